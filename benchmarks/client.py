"""Workloads of the benchmarks, put on a server by the client of `gilir bench`, and their figures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from scheduler_svc.cli.bench import client as load
from scheduler_svc.cli.bench import figures as load_figures
from scheduler_svc.cli.bench.client import Answer, Client, Request
from scheduler_svc.cli.bench.prompts import HIGHEST_ID, LOWEST_ID

SHORTEST_PROMPT, LONGEST_PROMPT = 16, 512
SHORTEST_OUTPUT, LONGEST_OUTPUT = 8, 256
COUNTS = ("requests", "failed", "seconds", "output_tokens", "output_tokens_per_s")


def synthetic(count: int, seed: int = 0) -> list[Request]:
    """Lengths with a long tail: log-normal, cut at both ends."""
    random = np.random.default_rng(seed)
    prompts = random.lognormal(np.log(100), 1.0, count).clip(SHORTEST_PROMPT, LONGEST_PROMPT).astype(int)
    outputs = random.lognormal(np.log(60), 0.9, count).clip(SHORTEST_OUTPUT, LONGEST_OUTPUT).astype(int)
    return [
        Request(random.integers(LOWEST_ID, HIGHEST_ID, prompt).tolist(), int(output))
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def read_workload(path: Path) -> list[Request]:
    """JSON lines with `prompt_ids` and `output_len`."""
    rows = (json.loads(line) for line in path.read_text().splitlines() if line.strip())
    return [Request(row["prompt_ids"], row["output_len"]) for row in rows]


def salted(requests: Sequence[Request], salt: int) -> list[Request]:
    """The same lengths with another second token, from among the prompts' own: no prefix is met twice, and a first
    token that begins every text stays."""
    random = np.random.default_rng(salt)
    ids = np.unique(np.concatenate([request.prompt[1:] for request in requests]))
    chosen = random.choice(ids, len(requests)).tolist()
    return [
        replace(request, prompt=[request.prompt[0], new, *request.prompt[2:]])
        for request, new in zip(requests, chosen, strict=True)
    ]


async def closed_loop(client: Client, requests: Sequence[Request], concurrency: int) -> list[Answer]:
    """So many clients, of which each sends its next request when it has the answer to its last."""
    answers: list[Answer] = []
    await load.closed_loop(client, requests, concurrency, answers.append)
    return answers


async def open_loop(client: Client, requests: Sequence[Request], rate: float, seed: int = 0) -> list[Answer]:
    """Poisson arrivals, `rate` a second, whether or not answers come."""
    arrivals = np.random.default_rng(seed).exponential(1 / rate, len(requests)).cumsum()
    answers: list[Answer] = []
    await load.open_loop(client, requests, arrivals.tolist(), answers.append)
    return answers


def figures(answers: Sequence[Answer]) -> dict[str, float]:
    """Those of `gilir bench` that servers are compared by, under flat names. Times in milliseconds."""
    told = load_figures.figures(answers)
    found: dict[str, float] = {name: told[name] for name in COUNTS if name in told}
    for name, quantiles in (("ttft", (50, 99)), ("itl", (50, 99)), ("tpot", (50,))):
        if values := told.get(f"{name}_ms"):
            found |= {f"{name}_p{q}_ms": values[f"p{q}"] for q in quantiles}
    return found
