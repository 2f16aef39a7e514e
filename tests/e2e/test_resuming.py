"""A client's connection and the executor both break in mid-answer; the answer is whole, at whichever frontend."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

BODY = {"prompt": [5, 6, 7], "ignore_eos": True, "temperature": 0, "stream": True}


def take(url: str, method: str, path: str, most: int, max_tokens: int = 60, **headers: str) -> tuple[int, list[bytes]]:
    """The status, and of the events of an answer so many, over a connection of its own that breaks behind them."""
    body = {"json": {**BODY, "max_tokens": max_tokens}} if method == "POST" else {}
    events, rest = [], b""
    with httpx.stream(method, f"{url}{path}", headers=headers, timeout=60, verify=False, **body) as answer:
        for data in answer.iter_raw():
            *whole, rest = (rest + data).split(b"\n\n")
            events += [event + b"\n\n" for event in whole]
            if len(events) >= most:
                break
    return answer.status_code, events[:most]


def text_of(events: list[bytes]) -> str:
    chunks = [json.loads(event.split(b"data: ", 1)[1]) for event in events[:-1]]
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


def test_a_broken_stream_goes_on_over_the_death_of_its_executor(start: Callable[..., Any]) -> None:
    stack = start("--frontends", "2", "--grace-s", "1")
    first = stack.services.start_executor("--delay-ms", "10", module="executor_svc.fake", name="one")
    stack.ready()
    asked = {"X-Gilir-Resumable": "true", "X-Request-Id": "job"}
    undisturbed = take(stack.url, "POST", "/v1/completions", 1000)[1]
    got = take(stack.url, "POST", "/v1/completions", 5, **asked)[1]
    first.kill()
    stack.services.processes.remove(first)
    stack.until(lambda: stack.metric("gilir_executors_lost_total") == 1, "the loss to be noticed")
    stack.services.start_executor("--delay-ms", "25", module="executor_svc.fake", name="two")
    dice = random.Random(7)
    while got[-1] != b"id: %d\ndata: [DONE]\n\n" % len(got):
        path, last = "/v1/requests/cmpl-job/stream", {"Last-Event-ID": str(len(got))}
        status, more = take(stack.url, "GET", path, dice.randrange(1, 12), **last)
        assert status == 200
        got += more
    assert [event.split(b"\n", 1)[0] for event in got] == [b"id: %d" % number for number in range(1, len(got) + 1)]
    assert text_of(got) == text_of(undisturbed)
    for _ in range(6):
        assert take(stack.url, "GET", "/v1/requests/job/stream", 1000) == (200, got)
    stack.until_idle()
    stack.until(lambda: stack.metric("gilir_kept_stream_bytes") > sum(map(len, got)), "it to be counted")
    assert stack.metric("gilir_kept_streams") == 1
    run_dir = stack.services.folder / "run"
    assert len(list(run_dir.glob("core.sock.frontend-*"))) == 2
    # What is read at the end, here and there, is told of it.
    names = [f"late-{i}" for i in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for name in names:
            begun = take(stack.url, "POST", "/v1/completions", 1, max_tokens=400, **{**asked, "X-Request-Id": name})
            assert len(begun[1]) == 1
        late = [pool.submit(take, stack.url, "GET", f"/v1/requests/{name}/stream", 1000) for name in names]
        stack.until(lambda: stack.metric("vllm:num_requests_running") == 4, "all to run")
        assert stack.scheduler.stop() == 0
        for told in late:
            *_, error, done = told.result(60)[1]
            assert b'"error"' in error and done.endswith(b"data: [DONE]\n\n")
    assert not run_dir.exists()
