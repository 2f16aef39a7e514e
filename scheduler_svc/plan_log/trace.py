"""`gilir trace LOG`: the run as a trace, for https://ui.perfetto.dev or chrome://tracing.

Each executor is a process with a thread for its iterations and one for each seat; the scheduler is a process of its
own, with the counters that concern all of it. Only what is under way is held in memory.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TextIO

from common.command_parser import command_parser
from scheduler_svc.plan_log.differences import Difference
from scheduler_svc.plan_log.format import FormatError
from scheduler_svc.plan_log.player import Player
from scheduler_svc.plan_log.trace_file import TraceFile
from scheduler_svc.plan_log.trace_lanes import LaneTracer

EXAMPLES = """
  gilir trace plans --output trace.json
"""


def parser(prog: str) -> argparse.ArgumentParser:
    made = command_parser(prog, "Turn a plan log into a trace for ui.perfetto.dev.", EXAMPLES)
    made.add_argument("log", type=Path, help="folder of the plan log, or one of its files")
    made.add_argument("--output", type=Path, default=Path("trace.json"), help="file to write (trace.json)")
    return made


def main(arguments: list[str], prog: str) -> int:
    """Exit status 0; 1 where the core decides otherwise than the log says; 2 for files that cannot be used."""
    options = parser(prog).parse_args(arguments)
    try:
        player = Player(options.log)
        with options.output.open("w") as file:
            num_events = write_trace(player, file)
    except (FormatError, OSError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    except Difference as difference:
        print(f"{prog}: the log does not replay, see `gilir replay`: {difference}", file=sys.stderr)
        return 1
    print(f"{options.output}: {num_events} events of {player.num_iterations} iterations; open it at ui.perfetto.dev")
    return 0


def write_trace(player: Player, file: TextIO) -> int:
    """Write the whole trace, also where the log breaks off; returns the number of events.

    Raises what `Player.steps` raises.
    """
    trace = TraceFile(file)
    tracer = LaneTracer(trace)
    try:
        for step in player.steps():
            tracer.see(step, player.scheduler, player.header)
    finally:
        tracer.close()
        trace.close()
    return trace.num_events
