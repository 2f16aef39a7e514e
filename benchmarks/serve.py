"""Throughput and latency over the REST API, and what the iterations behind them looked like.

    python -m benchmarks.serve [--model DIR] [--concurrency 1,8,32] [--rate 2,4] [--workload FILE.jsonl] [--json]
    python -m benchmarks.serve --url http://127.0.0.1:8000 [--pid PID] [--plan-log DIR]

Starts both services on this machine, or measures a server that runs: any that has OpenAI's `/v1/completions` and takes
token ids and `ignore_eos`. Closed loop: so many clients, each sends its next request when it has its answer. Open loop
(`--rate`): Poisson arrivals, so many a second. Answers stream, greedy, each with as many tokens as the workload says.

The workload is synthetic, with long tails, or a file of JSON lines with `prompt_ids` and `output_len`. Every run
changes the prompts near their start: none finds another's prefix in a cache. The client and the server share the
machine; `other_cpu_s` is what all else on it used meanwhile, and a run with much of it is void.

Where there is a plan log: `budget_fill` is the tokens of an iteration over the token budget, a bubble the time in which
the executor stood idle between two iterations although it had sequences to run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks import client as load
from benchmarks import iterations
from benchmarks.watch import Watch
from deploy.local import LocalServices

COLUMNS = (
    ("output_tokens_per_s", "output", "tok/s"),
    ("ttft_p50_ms", "TTFT p50", "ms"),
    ("ttft_p99_ms", "p99", "ms"),
    ("itl_p50_ms", "ITL p50", "ms"),
    ("itl_p99_ms", "p99", "ms"),
    ("tpot_p50_ms", "TPOT p50", "ms"),
    ("peak_rss_mib", "peak RSS", "MiB"),
    ("other_cpu_s", "other CPU", "s"),
    ("budget_fill", "fill", "of 1"),
    ("bubble_p50_ms", "bubble", "ms"),
    ("bubble_share", "bubbles", "of 1"),
)
"""Of the table: a figure, its name and its unit."""


@dataclass(frozen=True)
class Server:
    """What is measured. pids: of the processes whose memory and CPU time count, with their children."""

    url: str
    pids: tuple[int, ...] = ()
    plan_log: Path | None = None


def token_budget(url: str) -> int | None:
    """The lane's, as `/metrics` tells it."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        found = re.findall(r"^gilir_token_budget(?:\{[^}]*\})? (\S+)$", answer.read().decode(), re.MULTILINE)
    return max((int(float(value)) for value in found), default=None)


def served_model(url: str) -> str:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as answer:
        return str(json.load(answer)["data"][0]["id"])


def measure(
    server: Server, requests: Sequence[load.Request], *, concurrency: int | None = None, rate: float | None = None
) -> dict[str, float]:
    """One run, closed or open. Raises RuntimeError when every request failed."""
    client = load.Client(server.url, served_model(server.url))
    # Of the warm-up nothing counts; its prompts are not those of the run.
    warm = [load.Request(request.prompt, 8) for request in load.salted(requests[:2], 7)]
    asyncio.run(load.closed_loop(client, warm, 2))
    with Watch(server.pids) as watch:
        if rate is not None:
            answers = asyncio.run(load.open_loop(client, requests, rate))
        else:
            answers = asyncio.run(load.closed_loop(client, requests, concurrency or 1))
    found = load.figures(answers)
    if not found["requests"]:
        raise RuntimeError(f"no request was answered: {answers[0].error if answers else 'there was none'}")
    for answer in answers:
        if answer.error:
            print(f"a request failed: {answer.error}", file=sys.stderr)
    found |= watch.figures
    budget = token_budget(server.url) if server.plan_log is not None else None
    if server.plan_log is not None and budget:
        begin, end = min(a.sent for a in answers), max(a.ended for a in answers)
        found |= iterations.figures(iterations.between(server.plan_log, begin, end), budget)
    return found


def local_server(stack: ExitStack, options: argparse.Namespace) -> Server:
    """Both services, until the stack is closed. Raises `deploy.local.ServiceFailed`."""
    services = stack.enter_context(LocalServices(scheduler_flags=options.scheduler_flags.split()))
    services.start_scheduler()
    model = ["--model", options.model] if options.model else []
    services.start_executor(*model, *options.executor_flags.split())
    services.wait_ready(timeout_s=600)
    return Server(services.url, tuple(process.pid for process in services.processes), services.plan_log)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    def numbers(text: str) -> list[float]:
        return [float(part) for part in text.split(",") if part]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="model folder or GGUF file; default: the embedded model")
    parser.add_argument("--executor-flags", default="", help="as in '--dtype bfloat16 --kv-cache-gib 4'")
    parser.add_argument("--scheduler-flags", default="")
    parser.add_argument("--url", help="measure a server that runs")
    parser.add_argument("--pid", type=int, help="of that server: its memory and CPU time are counted")
    parser.add_argument("--plan-log", type=Path, help="of that server")
    parser.add_argument("--workload", type=Path, help="JSON lines; default: synthetic")
    parser.add_argument("--skip", type=int, default=0, help="requests at the start of the workload")
    parser.add_argument("--requests", type=int, default=64, help="of each run (%(default)s)")
    parser.add_argument("--concurrency", type=numbers, default=[], help="closed loops; with neither: 1,8,32")
    parser.add_argument("--rate", type=numbers, default=[], help="open loops, requests a second")
    parser.add_argument("--salt", type=int, default=1, help="other prompts of the same lengths")
    parser.add_argument("--json", action="store_true", help="one object a line")
    options = parser.parse_args(arguments)
    if not options.concurrency and not options.rate:
        options.concurrency = [1.0, 8.0, 32.0]
    return options


def show(line: dict[str, float], *, head: bool) -> str:
    """A row of the table, below the names and their units where `head` is set."""
    names = " ".join(f"{name:>9}" for _, name, _ in COLUMNS)
    units = " ".join(f"{unit:>9}" for _, _, unit in COLUMNS)
    cells = (f"{line[key]:9.4g}" if key in line else f"{'-':>9}" for key, _, _ in COLUMNS)
    load_is = f"c {line['concurrency']:.0f}" if "concurrency" in line else f"{line['rate']:g}/s"
    return (f"{'':8}{names}\n{'':8}{units}\n" if head else "") + f"{load_is:<8}" + " ".join(cells)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.workload is None:
        requests = load.synthetic(options.skip + options.requests)
    else:
        requests = load.read_workload(options.workload)
    requests = requests[options.skip : options.skip + options.requests]
    if not requests:
        print("error: --requests and --skip leave no request of the workload", file=sys.stderr)
        return 1
    runs: list[dict[str, float]] = [{"concurrency": concurrency} for concurrency in options.concurrency]
    runs += [{"rate": rate} for rate in options.rate]
    with ExitStack() as stack:
        if options.url:
            pids = () if options.pid is None else (options.pid,)
            server = Server(options.url.rstrip("/"), pids, options.plan_log)
        else:
            server = local_server(stack, options)
        for number, run in enumerate(runs):
            chosen = load.salted(requests, 1000 * options.salt + number)
            concurrency = int(run["concurrency"]) if "concurrency" in run else None
            line = run | measure(server, chosen, concurrency=concurrency, rate=run.get("rate"))
            print(json.dumps(line) if options.json else show(line, head=number == 0), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
