"""`gilir simulate`: compares scheduling settings on a workload, under a virtual clock."""

from __future__ import annotations

import argparse
import json
import sys
import time
from enum import StrEnum
from pathlib import Path

from common.command_parser import command_parser
from scheduler_svc.core.config import Preemption
from scheduler_svc.simulator import cost_model
from scheduler_svc.simulator.cost_model import CostModelError
from scheduler_svc.simulator.recording import Recording
from scheduler_svc.simulator.report import write_report
from scheduler_svc.simulator.rows import (
    CONFIG_FIELDS,
    COST_FIELDS,
    SETUP_FIELDS,
    Row,
    SettingError,
    changed,
    default_row,
    parse_comparison,
)
from scheduler_svc.simulator.simulation import Simulation, SimulationError
from scheduler_svc.simulator.summary import Summary, as_object, as_text, summarise, table
from scheduler_svc.simulator.traces import TraceError
from scheduler_svc.simulator.workload import Workload, WorkloadError, WorkloadSettings, build
from scheduler_svc.simulator.workload_flags import add_load, add_tenants, workload_settings

DESCRIPTION = """Runs the scheduler's core against virtual executors, whose iterations take as long as a cost model
says, and compares settings. Without --trace, give --requests, --prompt-lengths and --output-lengths. Lengths (and
deadlines) are fixed:N, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA."""

EXAMPLES = """
  gilir simulate --requests 500 --rate 4 --prompt-lengths lognormal:300:1 --output-lengths lognormal:100:1
  gilir simulate --trace TRACE.csv --rate 1.2 --compare fair:discipline=fair --report report.html
"""
COMPARE_HELP = """one more run, like the base but for these settings, for example
contiguous:kv=contiguous,preemption=none (repeat for more)"""


def main(arguments: list[str], prog: str) -> int:
    """Run the command. Exit status 2 when the arguments or a file cannot be used, 1 when a simulation fails."""
    options = parser(prog).parse_args(arguments)
    try:
        workload = build(workload_settings(options))
        rows = _rows(options, len(workload))
    except (WorkloadError, TraceError, CostModelError, SettingError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    recordings = []
    for row in rows:
        try:
            recordings.append(_run(row, workload))
        except SimulationError as error:
            print(f"{prog}: {row.name}: {error}", file=sys.stderr)
            return 1
    summaries = [summarise(one, row.cost) for row, one in zip(rows, recordings, strict=True)]
    _show(options.json, rows, summaries)
    for row, recording in zip(rows, recordings, strict=True):
        if recording.refusal:
            count = int(recording.refused.sum())
            print(f"{prog}: {row.name}: {count} requests refused; the first: {recording.refusal}", file=sys.stderr)
    if options.report is not None:
        try:
            write_report(options.report, _describe(options, workload), rows, recordings, summaries)
        except OSError as error:
            print(f"{prog}: --report: {options.report}: {error.strerror}", file=sys.stderr)
            return 2
    return 0


def _show(as_json: bool, rows: list[Row], summaries: list[Summary]) -> None:
    if not as_json:
        print(as_text(table([row.name for row in rows], summaries)), end="")
        return
    for row, summary in zip(rows, summaries, strict=True):
        print(json.dumps(as_object(row.name, row.settings(), summary, summaries[0])))


def _run(row: Row, workload: Workload) -> Recording:
    simulation = Simulation(row.config, row.setup, row.cost, workload)
    if not sys.stderr.isatty():
        return simulation.run()
    last = 0.0

    def progress(ended: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last > 0.2:
            last = time.monotonic()
            print(f"\r\033[K{row.name}: {ended} of {total} requests", end="", file=sys.stderr, flush=True)

    recording = simulation.run(progress)
    print("\r\033[K", end="", file=sys.stderr, flush=True)
    return recording


def _rows(options: argparse.Namespace, num_requests: int) -> list[Row]:
    """The base and what is compared with it."""
    base = default_row(cost_model.load(options.cost), max(num_requests, 1))
    given = {
        key: str(value)
        for key in (*CONFIG_FIELDS, *SETUP_FIELDS, *COST_FIELDS[1:])
        if (value := getattr(options, f"set_{key}")) is not None
    }
    try:
        base = changed(base, options.name, given)
    except SettingError as error:
        field, _, rest = str(error).partition(":")
        raise SettingError(f"--{field.replace('_', '-')}:{rest}") from None
    rows = [base]
    for text in options.compare:
        try:
            name, changes = parse_comparison(text)
            if any(row.name == name for row in rows):
                raise SettingError(f"there are two runs named {name!r}")
            rows.append(changed(base, name, changes))
        except SettingError as error:
            raise SettingError(f"--compare {text}: {error}") from None
    for row in rows:
        if row.config.preemption is Preemption.SWAP and not row.setup.host_blocks:
            print(f"{row.name}: without --host-blocks nothing can be swapped: it is recomputed", file=sys.stderr)
    return rows


def _describe(options: argparse.Namespace, workload: Workload) -> dict[str, str]:
    """The workload in words, for the report."""
    told = {
        "requests": f"{len(workload):,}",
        "prompt tokens": f"{int(workload.prompt_lengths.sum()):,}",
        "output tokens": f"{int(workload.output_lengths.sum()):,}",
    }
    names = ("trace", "arrivals", "rate", "concurrency", "prompt_lengths", "output_lengths", "max_tokens", "tenants")
    for name in (*names, "tenant_skew", "priorities", "deadlines_ms", "seed"):
        value = getattr(options, name)
        if value is not None and value != getattr(WorkloadSettings(), name):
            told[name.replace("_", " ")] = value.name if isinstance(value, Path) else str(value)
    return told


def parser(prog: str) -> argparse.ArgumentParser:
    made = command_parser(prog, DESCRIPTION, EXAMPLES)
    known = ", ".join(cost_model.presets())
    made.add_argument("--cost", default="yi-34b-2xa100", help=f"cost model: a file or one of {known} (%(default)s)")
    made.add_argument("--compare", action="append", default=[], metavar="NAME:field=value,…", help=COMPARE_HELP)
    made.add_argument("--name", default="base", help="name of the first run (%(default)s)")
    made.add_argument("--json", action="store_true", help="print one JSON object a run instead of the table")
    made.add_argument("--report", type=Path, metavar="FILE", help="write an HTML report with plots")
    workload = made.add_argument_group("workload")
    add_load(workload)
    add_tenants(workload)
    executor = made.add_argument_group("virtual executors")
    for name, one in SETUP_FIELDS.items():
        executor.add_argument(
            _flag(name), dest=f"set_{name}", metavar="N", help=f"default {one.default}, or the cost model's"
        )
    for name, text in (("overhead_ms", "added to every iteration"), ("request_ms", "added to every request's latency")):
        executor.add_argument(_flag(name), dest=f"set_{name}", metavar="MS", help=f"{text} (the cost model's)")
    scheduler = made.add_argument_group("scheduler", "the service's settings, with the service's defaults")
    for name, one in CONFIG_FIELDS.items():
        shown = {"max_waiting": "as many as there are requests", "tenant_weights": "JSON; 1 each"}.get(name)
        if shown is None:
            choices = " | ".join(type(one.default)) if isinstance(one.default, StrEnum) else ""
            shown = f"{choices} ({one.default})" if choices else str(one.default)
        if isinstance(one.default, bool):
            scheduler.add_argument(_flag(name), dest=f"set_{name}", nargs="?", const="true", metavar="BOOL", help=shown)
            scheduler.add_argument(
                f"--no-{name.replace('_', '-')}", dest=f"set_{name}", action="store_const", const="false"
            )
        else:
            scheduler.add_argument(_flag(name), dest=f"set_{name}", metavar="VALUE", help=shown)
    return made


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
