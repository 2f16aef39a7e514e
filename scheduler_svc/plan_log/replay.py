"""`gilir replay LOG`: run the core over a plan log again, and compare every plan with the one that was made."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from common.command_parser import command_parser
from scheduler_svc.plan_log.differences import Difference
from scheduler_svc.plan_log.explain import Explainer
from scheduler_svc.plan_log.format import FormatError
from scheduler_svc.plan_log.player import Player

EXAMPLES = """
  gilir replay plans                                    every plan again, byte for byte
  gilir replay plans --explain chatcmpl-1               why this request waited, iteration by iteration
"""


def parser(prog: str) -> argparse.ArgumentParser:
    made = command_parser(prog, "Run the core over a plan log again and compare every plan.", EXAMPLES)
    made.add_argument("log", type=Path, help="folder of the plan log, or one of its files")
    made.add_argument("--until", type=int, metavar="ITERATION", help="stop after the first plan of this number")
    made.add_argument("--explain", metavar="REQUEST_ID", help="tell why this request waited, iteration by iteration")
    return made


def main(arguments: list[str], prog: str) -> int:
    """Exit status 0: identical; 1: a plan differs, or there is no such request; 2: the log cannot be read."""
    options = parser(prog).parse_args(arguments)
    explainer = Explainer(options.explain) if options.explain is not None else None
    player = None
    try:
        player = Player(options.log)
        return _replay(player, explainer, options.until)
    except (FormatError, OSError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        if player is not None and player.num_iterations:
            print(f"{prog}: {player.num_iterations} iterations before that were identical", file=sys.stderr)
        return 2


def _replay(player: Player, explainer: Explainer | None, until: int | None) -> int:
    different = ""
    try:
        for step in player.steps():
            if explainer is not None:
                explainer.see(step, player.scheduler, player.header)
            if until is not None and step.plan is not None and step.plan.iteration >= until:
                break
    except Difference as difference:
        different = str(difference)
    for segment in player.segments:
        if segment.num_cut_bytes:
            print(f"{segment.path} ends within a block: its last {segment.num_cut_bytes} bytes are left out")
    if explainer is not None:
        print("\n".join(explainer.text()))
    outcome = "then a difference" if different else "identical"
    print(f"replayed {player.num_iterations} iterations, {player.num_requests} requests: {outcome}")
    if different:
        print(different)
    missing = explainer is not None and not explainer.stories
    return 1 if different or missing else 0
