"""What iteration-level scheduling brings over request-level batching, against what seat occupancy predicts.

Real services, and a scripted executor whose iterations all take the same time, so that throughput is bounded by how
many seats do useful work. Answers are as long as those of a trace. Orca (OSDI'22) argues that a batch held until
its longest member ends leaves the seats of the others empty: the gain in throughput must be the ratio of the mean rows
in an iteration, as the plan logs show them.

    python -m benchmarks.iteration_level --trace AzureLLMInferenceTrace_conv.csv
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np

from common.wire import Limits
from deploy.local import LocalServices
from executor_svc.fake import FakeExecutor
from executor_svc.fake_model import DEFAULT_MODEL, card_from_folder
from executor_svc.script import Script
from scheduler_svc.plan_log.reader import iterations
from scheduler_svc.simulator import traces

PROMPT = [20, 21, 22, 23]


@dataclass(frozen=True)
class Run:
    """One setting: what was seen at the client, and in the plan log."""

    batching: str
    seconds: float
    tokens: int
    rows: list[int]
    """Rows of each iteration."""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def mean_rows(self) -> float:
        return float(np.mean(self.rows))


def run(batching: str, lengths: list[int], seats: int, iteration_s: float) -> Run:
    """Ask for answers of these lengths at once and wait for all."""
    flags = ["--batching", batching, "--max-num-seqs", str(seats), "--max-waiting", str(len(lengths))]
    limits = Limits(16, 100_000, 0, seats, 4096)
    with LocalServices(scheduler_flags=flags) as services:
        services.start_scheduler()
        card = card_from_folder(DEFAULT_MODEL, "model")
        script = Script(delay_s=iteration_s)
        with FakeExecutor(
            services.executor_address, script, model=card, limits=limits, record_plans=False, verify=False
        ):
            services.wait_ready()
            with httpx.Client(base_url=services.url, timeout=None, limits=httpx.Limits(max_connections=None)) as client:

                def ask(length: int) -> int:
                    body = {"prompt": PROMPT, "max_tokens": length, "ignore_eos": True}
                    answer = client.post("/v1/completions", json=body).raise_for_status().json()
                    return int(answer["usage"]["completion_tokens"])

                with ThreadPoolExecutor(len(lengths)) as pool:
                    began = time.perf_counter()
                    tokens = sum(pool.map(ask, lengths))
                    seconds = time.perf_counter() - began
        services.processes[0].stop()
        rows = [sample.decodes + (sample.prefill_tokens > 0) for sample in iterations(services.plan_log)]
    return Run(batching, seconds, tokens, rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, required=True, help="a trace that `gilir simulate` reads")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--seats", type=int, default=32)
    parser.add_argument("--iteration-ms", type=float, default=10.0)
    parser.add_argument("--scale", type=float, default=0.5, help="of the trace's answer lengths")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    answers = traces.read(options.trace, options.requests).output_lengths.tolist()
    lengths = [min(400, max(1, round(length * options.scale))) for length in answers]
    held, moving = (run(b, lengths, options.seats, options.iteration_ms / 1000) for b in ("request", "iteration"))
    gain, predicted = moving.tokens_per_s / held.tokens_per_s, moving.mean_rows / held.mean_rows
    if options.json:
        rows = [
            {"batching": r.batching, "tokens_per_s": r.tokens_per_s, "mean_rows": r.mean_rows} for r in (held, moving)
        ]
        for row in [*rows, {"gain": gain, "predicted": predicted}]:
            print(json.dumps(row))
    else:
        for result in (held, moving):
            print(
                f"{result.batching:<10} {result.tokens_per_s:8.1f} tokens/s  {result.mean_rows:6.2f} rows an iteration"
            )
        print(f"gain {gain:.3f}, by occupancy {predicted:.3f}: {100 * (gain / predicted - 1):+.1f} %")
    return 0


if __name__ == "__main__":
    sys.exit(main())
