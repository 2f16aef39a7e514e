"""How long a stream stands still when its executor is drained: with its KV handed over, and with it computed anew.

Two schedulers side by side, one for each way, each with two real executors. In each round a prompt of random tokens is
sent, and once its answer flows, the executor that runs it gets SIGTERM; a fresh executor takes the place of the drained
one for the next round. The pause is the longest time between two events of the stream after the signal; the ways take
turns.

    python -m benchmarks.handover --lengths 128 512 960
    python -m benchmarks.handover --model /models/NAME --lengths 512 4096 --flags "--device cuda:0 --dtype bfloat16"
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import statistics
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import httpx
import numpy as np

from deploy.local import LocalServices, Process
from executor_svc.fake_model import DEFAULT_MODEL

WAYS = {"recompute": "never", "hand-over": "always"}
NUM_BEFORE = 8
"""Events of a stream before the signal."""
NUM_AFTER = 24


class Bed:
    """A scheduler and two executors."""

    def __init__(self, handover: str, flags: list[str]) -> None:
        self._services = LocalServices(scheduler_flags=["--handover", handover, "--no-prefix-caching"])
        self._flags = flags
        self._services.start_scheduler()
        self._executors = {name: self._start(name) for name in ("0", "1")}
        self._num_started = 2
        self._services.wait_ready()
        self.client = httpx.Client(base_url=self._services.url, timeout=600)

    def _start(self, name: str) -> Process:
        return self._services.start_executor(*self._flags, name=name)

    def close(self) -> None:
        self.client.close()
        self._services.stop()

    def metric(self, name: str) -> dict[str, float]:
        """By executor; under an empty name where there is no such label."""
        text = self.client.get("/metrics").text
        found = re.findall(rf"^{name}(?:{{([^}}]*)}})? (\S+)$", text, re.MULTILINE)
        engines = ((re.search(r'engine="([^"]*)"', labels), value) for labels, value in found)
        return {engine[1] if engine else "": float(value) for engine, value in engines}

    def pause_s(self, prompt: list[int]) -> float:
        """One round."""
        while self.metric("gilir_lanes")[""] < 2:
            time.sleep(0.1)
        body = {"prompt": prompt, "max_tokens": NUM_BEFORE + NUM_AFTER, "ignore_eos": True, "stream": True}
        times: list[float] = []
        leaver: list[str] = []

        def drain() -> None:
            held = self.metric("gilir_kv_blocks_referenced")
            leaver.append(max(held, key=lambda name: held[name]))
            process = self._executors[leaver[0]]
            drained_at.append(time.perf_counter())
            process.popen.terminate()

        drained_at: list[float] = []
        thread = threading.Thread(target=drain)
        with self.client.stream("POST", "/v1/completions", json=body) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                times.append(time.perf_counter())
                if len(times) == NUM_BEFORE:
                    thread.start()
        thread.join()
        gaps = [b - a for a, b in pairwise(times) if b > drained_at[0]]
        self._replace(leaver[0])
        return max(gaps, default=float("nan"))

    def _replace(self, name: str) -> None:
        process = self._executors.pop(name)
        process.stop()
        self._services.processes.remove(process)
        fresh = str(self._num_started)
        self._num_started += 1
        self._executors[fresh] = self._start(fresh)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 960], help="prompt tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--flags", type=shlex.split, default=[], help="more flags of the executors, as one text")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    vocab_size = int(json.loads((options.model / "config.json").read_text())["vocab_size"])
    draw = np.random.default_rng(1)
    beds = {way: Bed(handover, ["--model", str(options.model), *options.flags]) for way, handover in WAYS.items()}
    try:
        for length in options.lengths:
            pauses: dict[str, list[float]] = {way: [] for way in WAYS}
            for _ in range(options.rounds):
                prompt = draw.integers(vocab_size // 2, vocab_size, length).tolist()
                for way, bed in beds.items():
                    pauses[way].append(bed.pause_s(prompt))
            moved = beds["hand-over"].metric("gilir_handover_blocks_total")[""]
            report(length, {way: statistics.median(found) for way, found in pauses.items()}, moved, options.json)
    finally:
        for bed in beds.values():
            bed.close()
    return 0


def report(length: int, medians: dict[str, float], num_blocks: float, as_json: bool) -> None:
    """num_blocks: handed over so far."""
    ratio = medians["recompute"] / medians["hand-over"]
    if as_json:
        print(
            json.dumps({"prompt_tokens": length, "pause_s": medians, "ratio": ratio, "blocks": num_blocks}), flush=True
        )
        return
    told = "  ".join(f"{way} {1000 * seconds:8.1f} ms" for way, seconds in medians.items())
    print(f"{length:6} prompt tokens: {told}  ratio {ratio:5.2f}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
