"""`gilir bench`: a load generator, its table, and its report."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from common.command_parser import command_parser
from scheduler_svc.cli.bench.client import Answer, Client, Request, closed_loop, open_loop
from scheduler_svc.cli.bench.figures import figures
from scheduler_svc.cli.bench.prompts import requests as prompts_of
from scheduler_svc.cli.bench.report import latency_table, render, totals
from scheduler_svc.cli.connection import Connection, base_url, chosen_model
from scheduler_svc.cli.errors import CommandError
from scheduler_svc.cli.parsing import add_server, key_of
from scheduler_svc.cli.terminal import on_one_line, plain_console
from scheduler_svc.simulator.traces import TraceError
from scheduler_svc.simulator.workload import Workload, WorkloadError, build
from scheduler_svc.simulator.workload_flags import add_load, workload_settings

DEFAULT_CONCURRENCY, DEFAULT_REQUESTS = 8, 64
DEFAULT_PROMPTS, DEFAULT_OUTPUTS = "lognormal:100:1", "lognormal:60:0.9"
MAX_WARM_UP_TOKENS = 8
DESCRIPTION = f"""Puts load on a server of OpenAI's API, and tells what its clients see: latencies, throughput, errors.
The load is that of `gilir simulate`: a trace, or lengths fixed:N, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA; in a
closed loop (--concurrency, {DEFAULT_CONCURRENCY} if nothing is said) or with arrivals at a --rate. Prompts are random
token ids, so that no two share a prefix but where a trace says so. Ctrl-C ends it, with the figures so far."""
EXAMPLES = """
  gilir bench
  gilir bench --concurrency 32 --requests 500 --prompt-lengths fixed:512 --output-lengths uniform:50:200
  gilir bench --rate 4 --requests 200 --html report.html
  gilir bench --trace mooncake.jsonl --rate 2 --requests 1000 --json
  gilir bench --url https://api.example --model NAME --api chat --allow-eos
"""


def parser(prog: str) -> argparse.ArgumentParser:
    made = command_parser(prog, DESCRIPTION, EXAMPLES)
    add_server(made)
    made.add_argument("--model", help="which of the server's models (the first)")
    made.add_argument("--api", choices=["completions", "chat"], default="completions", help="(%(default)s)")
    made.add_argument(
        "--text", action="store_true", help="prompts of words, for servers that take no ids; chats are so"
    )
    made.add_argument(
        "--allow-eos", action="store_true", help="answers may end early; for servers that know no ignore_eos"
    )
    made.add_argument("--warm-up", type=int, default=2, metavar="N", help="requests before, not counted (%(default)s)")
    made.add_argument("--timeout-s", type=float, default=600.0, metavar="S", help="of a request (%(default)g)")
    made.add_argument("--json", action="store_true", help="print one JSON object instead of the tables")
    made.add_argument("--html", type=Path, metavar="FILE", help="write a report with charts, one file")
    add_load(made.add_argument_group("load"))
    return made


def main(arguments: list[str], prog: str) -> int:
    """Exit status 0; 1 where no request was answered, 2 for a load that makes no sense, 130 where Ctrl-C came."""
    options = parser(prog).parse_args(arguments)
    _fill_in(options)
    try:
        workload = build(workload_settings(options))
    except (WorkloadError, TraceError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    with Connection(options.url, key_of(options)) as connection:
        model = chosen_model(connection, options.model)
    client = Client(
        base_url(options.url),
        model,
        options.timeout_s,
        key=key_of(options),
        chat=options.api == "chat",
        whole=not options.allow_eos,
    )
    as_text = options.text or options.api == "chat"
    requests = prompts_of(workload, options.seed, as_text=as_text)
    warm_up = prompts_of(workload, options.seed + 1, as_text=as_text)[: max(options.warm_up, 0)]
    answers, interrupted = _measure(client, requests, warm_up, workload)
    found = figures(answers)
    if options.json:
        print(json.dumps({"url": base_url(options.url), "model": model} | found))
    else:
        _show(found)
    if options.html is not None:
        _write(options.html, render(_describe(options, model, len(requests)), found, answers))
    if interrupted:
        return 130
    return 0 if found["requests"] else 1


def _fill_in(options: argparse.Namespace) -> None:
    """What the load is where nothing is said."""
    if options.concurrency is None and options.rate is None and options.arrivals is None:
        options.concurrency = DEFAULT_CONCURRENCY if options.trace is None else None
    if options.concurrency is not None and options.arrivals is None and options.rate is None:
        options.arrivals = "closed"
    if options.trace is None:
        options.requests = DEFAULT_REQUESTS if options.requests is None else options.requests
        options.prompt_lengths = options.prompt_lengths or DEFAULT_PROMPTS
        options.output_lengths = options.output_lengths or DEFAULT_OUTPUTS


def _measure(
    client: Client, requests: Sequence[Request], warm_up: Sequence[Request], workload: Workload
) -> tuple[list[Answer], bool]:
    """The answers, and whether Ctrl-C came before the last."""
    answers: list[Answer] = []
    console = plain_console(stderr=True)  # stdout is for the figures
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("warming up", total=len(requests))

        def note(answer: Answer) -> None:
            answers.append(answer)
            progress.advance(task)

        async def run() -> None:
            await closed_loop(client, [Request(r.prompt, min(r.output, MAX_WARM_UP_TOKENS)) for r in warm_up], 1, _drop)
            progress.update(task, description="requests")
            if workload.concurrency:
                await closed_loop(client, requests, workload.concurrency, note)
            else:
                await open_loop(client, requests, workload.arrivals.tolist(), note)

        try:
            asyncio.run(run())
        except KeyboardInterrupt:
            return answers, True
    return answers, False


def _drop(answer: Answer) -> None:
    """An answer of the warm-up. Raises `CommandError` where it failed: all others would, too."""
    if answer.error:
        raise CommandError(f"the first request failed: {on_one_line(answer.error)}")


def _show(found: dict[str, Any]) -> None:
    console = plain_console()
    for lines, has_head in ((totals(found), False), (latency_table(found), True)):
        made = Table(box=box.SIMPLE_HEAD, show_header=has_head, pad_edge=False)
        for i, title in enumerate(lines[0] if has_head else ["", ""]):
            made.add_column(title, justify="right" if i else "left")
        for line in lines[has_head:]:
            made.add_row(*line)
        if made.row_count:
            console.print(made)
    for text, count in found["errors"].items():
        print(f"{count} × {on_one_line(text)}", file=sys.stderr)


def _describe(options: argparse.Namespace, model: str, count: int) -> dict[str, str]:
    """The load in words, for the report."""
    told = {"server": base_url(options.url), "model": model, "API": options.api, "requests": str(count)}
    for name in ("trace", "arrivals", "rate", "concurrency", "prompt_lengths", "output_lengths", "max_tokens", "seed"):
        value = getattr(options, name)
        if value is not None:
            told[name.replace("_", " ")] = value.name if isinstance(value, Path) else str(value)
    return told


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"--html: {path}: {error.strerror or error}") from None
