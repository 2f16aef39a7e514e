"""`gilir calibrate`: fits the simulator's cost model to a plan log."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from common.command_parser import command_parser
from scheduler_svc.simulator.cost_model import CostModel
from scheduler_svc.simulator.fitting import Fit, FitError, fit
from scheduler_svc.simulator.iteration import FEATURES
from scheduler_svc.simulator.samples import LogError, executor_of, logged, sample

DESCRIPTION = """Fits the duration of iterations to what they computed, and writes a cost model for `gilir simulate`.
The log comes from a service that was started with --plan-log and served a load like the one to be simulated."""
POOR = 0.25
POOR_TEXT = """warning: the fit is poor. Record minutes of a load like yours, with few and with many sequences at a time
and with long prompts, on a machine that does nothing else; --skip leaves out the first iterations"""


EXAMPLES = """
  gilir calibrate plans --output mine.json
  gilir simulate --cost mine.json --requests 500 --rate 4 --prompt-lengths fixed:300 --output-lengths fixed:100
"""


def parser(prog: str) -> argparse.ArgumentParser:
    made = command_parser(prog, DESCRIPTION, EXAMPLES)
    made.add_argument("log", type=Path, help="a plan log")
    made.add_argument("--output", type=Path, required=True, metavar="FILE", help="where the cost model is written")
    made.add_argument("--name", help="of the cost model (the file's)")
    made.add_argument("--skip", type=int, default=0, metavar="N", help="leave out the first N iterations: warming up")
    return made


def main(arguments: list[str], prog: str) -> int:
    """Run the command. Exit status 2 when the log cannot be used."""
    options = parser(prog).parse_args(arguments)
    try:
        samples = list(logged(options.log))
        found = fit([sample(one) for one in samples[max(options.skip, 0) :]])
    except (LogError, FitError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    model = cost_model(found, options.name or options.output.stem, f"plan log {options.log.name}", executor_of(samples))
    try:
        options.output.write_text(model.to_json())
    except OSError as error:
        print(f"{prog}: --output: {options.output}: {error.strerror}", file=sys.stderr)
        return 2
    print(describe(found), end="")
    if found.median_error > POOR:
        print(f"{prog}: {POOR_TEXT}", file=sys.stderr)
    return 0


def cost_model(found: Fit, name: str, source: str, executor: dict[str, int]) -> CostModel:
    """The fit as a cost model that tells where it comes from and how far off it is."""
    return CostModel(
        name=name,
        pieces=found.pieces,
        executor=executor,
        fit={
            "source": source,
            "shape": shape(found),
            "samples": found.num_samples,
            "held_out": found.num_held_out,
            "median_error": round(found.median_error, 4),
            "p90_error": round(found.p90_error, 4),
            "total_error": round(found.total_error, 4),
            "note": "errors are relative and those of the held-out iterations; total: of the sum of their durations",
        },
    )


def shape(found: Fit) -> str:
    return "linear" if len(found.pieces) == 1 else "the maximum of two linear pieces"


def describe(found: Fit) -> str:
    """The fit in words."""
    lines = [
        f"{found.num_samples} iterations, {found.num_held_out} of them held out; {shape(found)}",
        f"relative error of the held-out: median {found.median_error:.1%}, p90 {found.p90_error:.1%},"
        f" of their sum {found.total_error:+.1%}",
    ]
    for i, name in enumerate(FEATURES):
        values = "  ".join(f"{1e6 * piece[i]:12.4f}" for piece in found.pieces)
        lines.append(f"{name:<18}{values}  µs")
    return "\n".join(lines) + "\n"
