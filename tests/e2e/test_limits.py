"""What bounds a request and a frontend: time limits, the queue, and a frontend that hangs (C03, C35)."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from executor_svc.script import Action, Script

LIMIT = {"X-Request-Timeout": "0.6"}


def test_a_request_over_its_time_ends_with_504_and_frees_its_seat(start: Callable[..., Any]) -> None:
    stack = start()
    stack.fake(script=Script(delay_s=0.02), max_num_seqs=1)
    stack.ready()
    body = {"prompt": "a", "max_tokens": 900, "ignore_eos": True}
    begun = time.monotonic()
    answer = stack.client.post("/v1/completions", json=body, headers=LIMIT)
    assert answer.status_code == 504 and 0.6 <= time.monotonic() - begun < 5
    assert answer.json()["error"]["code"] == "request_timeout"
    with stack.client.stream("POST", "/v1/completions", json=body | {"stream": True}, headers=LIMIT) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert '"request_timeout"' in lines[-2] and lines[-1] == "data: [DONE]" and len(lines) > 5
    assert stack.text("b", 5)
    stack.until_idle()


def test_time_limits_hold_while_the_executor_hangs_and_while_there_is_none(start: Callable[..., Any]) -> None:
    stack = start()
    fake = stack.fake(script=Script(actions={2: Action.HANG}))
    stack.ready()
    body = {"prompt": "a", "max_tokens": 50, "ignore_eos": True}
    assert stack.client.post("/v1/completions", json=body, headers=LIMIT).status_code == 504
    fake.kill()
    stack.until(lambda: stack.metric("gilir_lanes") == 0, "the executor to be missed")
    assert stack.client.post("/v1/completions", json=body, headers=LIMIT).status_code == 504
    stack.until(lambda: stack.metric("gilir_live_sequences") == 0, "nothing to be left")


def test_a_frontend_that_hangs_is_started_anew(start: Callable[..., Any]) -> None:
    stack = start("--frontend-timeout-s", "3")
    stack.fake(script=Script(delay_s=0.02))
    stack.ready()
    pid = stack.scheduler.pid
    (frontend,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    body = {"prompt": "a", "max_tokens": 900, "ignore_eos": True}
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(httpx.post, f"{stack.url}/v1/completions", json=body, timeout=60)
        stack.until(lambda: stack.planned_requests(), "the request to run")
        os.kill(int(frontend), signal.SIGSTOP)
        assert isinstance(waiting.exception(timeout=60), httpx.TransportError), "its client is not left waiting"
    stack.client.close()
    stack.client = httpx.Client(base_url=stack.url, timeout=60)
    stack.ready()
    assert stack.text("b", 5)
    stack.until_idle()
