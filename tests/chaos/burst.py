"""`python -m tests.chaos.burst`: thousands of requests at once against a short queue; only the right ones are refused.

The rule: a request of n sequences is refused when those that wait and have never run, and its own n, are more than
`--max-waiting`. It is looked at in the order in which the core hears of the requests, which the plan log tells. One
request holds the only seat meanwhile, so that nobody leaves the queue.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
from pathlib import Path
from typing import Any

from common.wire import Ended, EndReason
from executor_svc.script import Action
from scheduler_svc.plan_log.format import Kind
from scheduler_svc.plan_log.player import Player
from tests.chaos.client import Answer, End, exchange
from tests.chaos.services import Services, Settings

PLUG = "plug"


def settings(folder: Path, max_waiting: int, frontends: int) -> Settings:
    flags = ["--max-waiting", str(max_waiting), "--max-num-seqs", "1", "--iteration-timeout-s", "600"]
    # The relay is in this process, which is busy with its clients.
    flags += ["--heartbeat-timeout-s", "300", "--plan-log", str(folder / "plans")]
    return Settings(folder, executors=1, frontends=frontends, delay_s=0.0, patience_s=300.0, scheduler_flags=flags)


def bodies(count: int, seed: int) -> list[dict[str, Any]]:
    """Most ask for one sequence, some for more."""
    draw = random.Random(seed)
    return [
        {"prompt": [6 + i % 4000, 6 + i // 4000], "max_tokens": 2, "temperature": 0, "ignore_eos": True,
         "n": draw.choice((1, 1, 1, 1, 2, 5))}
        for i in range(count)
    ]  # fmt: skip


def refused_by_the_rule(plan_log: Path, max_waiting: int) -> tuple[set[str], set[str]]:
    """Ids of the requests that the rule refuses, and of those that the core refused, by its own record."""
    waiting, right, told = 0, set(), set()
    for step in Player(plan_log).steps():
        if step.kind is not Kind.SUBMIT or step.requests[0].request_id == PLUG:
            continue
        request_id, n = step.requests[0].request_id, sum(request.n for request in step.requests)
        if waiting + n > max_waiting:
            right.add(request_id)
        else:
            waiting += n
        if any(isinstance(m, Ended) and m.reason == EndReason.QUEUE_FULL for _, m in step.messages):
            told.add(request_id)
    return right, told


def faults(asked: list[dict[str, Any]], answers: list[Answer], right: set[str], told: set[str]) -> list[str]:
    """What is wrong, at most one line a request."""
    found = [f"refused {len(told)} requests, by the rule {len(right)}"] if told != right else []
    for number, (body, answer) in enumerate(zip(asked, answers, strict=True)):
        if answer.end is not End.WHOLE:
            found.append(f"request {number}: {answer.end}")
        elif str(number) in right:
            code = (answer.json or {}).get("error", {}).get("code")
            if answer.status != 429 or code != "queue_full" or int(answer.headers.get("retry-after", "0")) < 1:
                found.append(f"request {number} is over the limit, and got {answer.status} {answer.body[:200]!r}")
        elif answer.status != 200 or len(answer.json["choices"]) != body["n"]:
            found.append(f"request {number} is within the limit, and got {answer.status} {answer.body[:200]!r}")
    return found


async def run(folder: Path, count: int, max_waiting: int, seed: int, *, frontends: int = 2) -> list[str]:
    """Returns what is wrong."""
    services = Services(settings(folder, max_waiting, frontends))
    try:
        await services.start()
        services.tell(services.ready[0], actions={1: Action.HANG})
        plug = asyncio.create_task(_post(services, {"prompt": [5], "max_tokens": 1}, PLUG))
        await services.until(lambda: _gauge(services, "running", 1), "the seat to be taken", 30)
        asked = bodies(count, seed)
        tasks = [asyncio.create_task(_post(services, body, str(i))) for i, body in enumerate(asked)]
        # Refusals come at once. What is left has been accepted, and waits.
        await services.until(lambda: _all_heard(services, asked, tasks), "all requests to be heard", 300)
        services.tell(services.ready[0])
        answers = list(await asyncio.gather(*tasks))
        plugged = await plug
        await services.until(lambda: _gauge(services, "running", 0), "the services to be idle", 30)
    finally:
        await services.stop()
    right, told = refused_by_the_rule(folder / "plans", max_waiting)
    found = faults(asked, answers, right, told)
    if plugged.status != 200:
        found.append(f"the request that held the seat got {plugged.status}")
    waits = sorted({answer.headers["retry-after"] for answer in answers if answer.status == 429}, key=int)
    print(f"requests {count} answered {count - len(told)} refused {len(told)} retry_after_s {','.join(waits)}")
    return found


async def _post(services: Services, body: dict[str, Any], request_id: str) -> Answer:
    headers = {"X-Request-Id": request_id}
    data = json.dumps(body).encode()
    return await exchange(services.port, "POST", "/v1/completions", data, headers=headers, patience_s=600)


async def _gauge(services: Services, which: str, value: float) -> bool:
    return (await services.metrics()).get(f"vllm:num_requests_{which}") == value


async def _all_heard(services: Services, asked: list[dict[str, Any]], tasks: list[asyncio.Task[Answer]]) -> bool:
    held = sum(body["n"] for body, task in zip(asked, tasks, strict=True) if not task.done())
    return await _gauge(services, "waiting", held)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.burst", description=__doc__)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--max-waiting", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="gilir-burst-") as folder:
        found = asyncio.run(run(Path(folder), options.requests, options.max_waiting, options.seed))
    for text in found[:20]:
        print(text)
    print(f"wrong {len(found)}")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
