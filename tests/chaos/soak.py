"""`python -m tests.chaos.soak --minutes M`: requests of every kind and end for a long time; memory and files stay flat.

Prints the anonymous memory of each process by requests served, its open files, and what the registries hold at rest.
The exit status is 1 when a process grows by more than 1 MB in 10,000 requests after the warm-up, or a gauge is not 0.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from tests.chaos.client import Answer, End, exchange
from tests.chaos.services import Services, Settings, served

MAX_GROWTH_MB = 1.0
"""In 10,000 requests."""
MAX_MORE_FDS = 8
WORKERS = 12
MIN_SAMPLES = 4
STEP = 1000
"""Requests between two looks."""


@dataclass
class Sample:
    """What was seen at rest, after so many requests."""

    requests: int
    anonymous_mb: dict[str, float]
    fds: dict[str, int]
    busy: list[str]
    """Gauges that are not 0."""


@dataclass
class Soak:
    services: Services
    seed: int
    served: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    samples: list[Sample] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    async def run(self, end_at: float, num_requests: int | None, step: int = STEP) -> None:
        """Until a time (monotonic), or so many requests."""
        print_head()
        while time.monotonic() < end_at and (num_requests is None or self.served < num_requests):
            goal = self.served + step
            await asyncio.gather(*(self._work(i, goal) for i in range(WORKERS)))
            self.samples.append(await self._look())
            if self.served % 10_000 < step or num_requests is not None:
                print_row(self.samples[-1])

    async def _work(self, number: int, goal: int) -> None:
        draw = random.Random(f"{self.seed}/{number}/{goal}")
        while self.served < goal:
            self.served += 1
            name, body, leave_s = request(draw)
            path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
            data = json.dumps(body).encode()
            answer = await exchange(self.services.port, "POST", path, data, leave_s=leave_s)
            self._judge(name, answer)

    def _judge(self, name: str, answer: Answer) -> None:
        self.ends[name] += 1
        right = 400 if name == "bad" else 200
        if answer.end is End.LEFT and name == "leaves":
            return
        if answer.end is not End.WHOLE or answer.status != right:
            self.wrong.append(f"{name}: {answer.end}, status {answer.status}, {answer.body[:200]!r}")

    async def _look(self) -> Sample:
        services = self.services
        busy = await services.busy()
        processes = {"core": services.scheduler.pid, "executor": services.staying[0].process.pid}
        processes |= {f"frontend-{i}": pid for i, pid in enumerate(sorted(services.frontend_pids()))}
        memory = {role: anonymous_mb(pid) for role, pid in processes.items()}
        fds = {role: psutil.Process(pid).num_fds() for role, pid in processes.items()}
        return Sample(self.served, memory, fds, busy)


def anonymous_mb(pid: int) -> float:
    """RssAnon of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    return int(found[1]) / 1024 if found else 0.0


def request(draw: random.Random) -> tuple[str, dict[str, Any], float | None]:
    """What kind it is, its body, and when its client leaves. No two prompts are alike."""
    kind = draw.random()
    own = [draw.randrange(6, 4000) for _ in range(draw.randint(3, 60))]
    body: dict[str, Any] = {"prompt": own, "max_tokens": draw.randint(1, 16), "temperature": draw.choice((0, 1))}
    if draw.random() < 0.5:
        body["stream"] = True
    if kind < 0.1:
        bad = draw.choice(
            ({"max_tokens": -1}, {"temperature": "hot"}, {"prompt": [5000]}, {"n": 0}, {"prompt": own * 400})
        )
        return "bad", body | bad, None
    if kind < 0.25:
        return "leaves", body | {"max_tokens": 200}, draw.uniform(0.001, 0.05)
    if kind < 0.4:
        text = f"Tell me of {draw.randrange(1 << 60)}"
        chat = {"messages": [{"role": "user", "content": text}], "max_tokens": body["max_tokens"]}
        return "chat", chat | {"user": f"tenant-{draw.randrange(1 << 60)}"}, None
    if kind < 0.5:
        return "several", body | {"n": 3, "logprobs": 1, "stop": ["th"]}, None
    return "plain", body, None


def growth_mb(samples: list[Sample], role: str) -> float:
    """Megabytes in 10,000 requests: the slope of the straight line through the samples."""
    requests = np.array([sample.requests for sample in samples], float)
    memory = np.array([sample.anonymous_mb[role] for sample in samples])
    return float(np.polyfit(requests, memory, 1)[0] * 10_000)


def after_warm_up(samples: list[Sample]) -> list[Sample]:
    """Without the first third: pools, caches and arenas fill in it."""
    return samples[len(samples) // 3 :]


def verdict(soak: Soak) -> list[str]:
    """What is wrong."""
    found = soak.wrong[:20]
    samples = after_warm_up(soak.samples)
    if len(samples) < MIN_SAMPLES:
        return [*found, f"{soak.served} requests are too few to tell"]
    found += [f"not at rest after {s.requests} requests: {', '.join(s.busy)}" for s in soak.samples if s.busy][:5]
    for role in samples[0].anonymous_mb:
        growth = growth_mb(samples, role)
        print(f"{role}: {growth:+.2f} MB in 10,000 requests")
        if growth > MAX_GROWTH_MB:
            found.append(f"{role} grows by {growth:.2f} MB in 10,000 requests")
        more = samples[-1].fds[role] - samples[0].fds[role]
        if more > MAX_MORE_FDS:
            found.append(f"{role} has {more} more open files")
    return found


def print_head() -> None:
    print("requests | anonymous MB of each process | open files | gauges not at 0", flush=True)


def print_row(sample: Sample) -> None:
    memory = " ".join(f"{role} {mb:.1f}" for role, mb in sample.anonymous_mb.items())
    fds = " ".join(f"{role} {count}" for role, count in sample.fds.items())
    print(f"{sample.requests} | {memory} | {fds} | {' '.join(sample.busy) or '-'}", flush=True)


async def run(services: Services, minutes: float, num_requests: int | None, seed: int, step: int = STEP) -> Soak:
    """Run it on services that run."""
    state = Soak(services, seed)
    await state.run(time.monotonic() + minutes * 60, num_requests, step)
    return state


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--requests", type=int, help="end after so many, if the time is not over before")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="gilir-soak-") as folder:
        settings = Settings(Path(folder), executors=1, delay_s=0.0, executor_flags=["--no-verify"])
        minutes, requests, seed = options.minutes, options.requests, options.seed
        state = asyncio.run(served(settings, lambda services: run(services, minutes, requests, seed)))
    print("requests: " + ", ".join(f"{name} {count}" for name, count in state.ends.most_common()))
    found = verdict(state)
    for text in found:
        print(text)
    print(f"requests {state.served} wrong {len(found)}")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
