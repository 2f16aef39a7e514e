"""A client that leaves frees its seat and blocks within an iteration (C02, C05, C06)."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import pytest

from executor_svc.script import Script


def send_request(url: str, **body: object) -> socket.socket:
    """POST a completion over a bare socket, which the test then closes as it likes."""
    parts = urlsplit(url)
    data = json.dumps({"ignore_eos": True, "temperature": 0} | body).encode()
    connection = socket.create_connection((parts.hostname, parts.port), timeout=60)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


@pytest.mark.parametrize(
    ("n", "stream"),
    [
        (1, False),
        (4, True),
        pytest.param(1, True, marks=pytest.mark.nightly),
        pytest.param(4, False, marks=pytest.mark.nightly),
    ],
)
def test_leaving_in_mid_answer_ends_the_work(start: Callable[..., Any], stream: bool, n: int) -> None:
    stack = start()
    fake = stack.fake(script=Script(delay_s=0.01))
    stack.ready()
    connection = send_request(stack.url, prompt=[7, 8, 9], max_tokens=900, n=n, stream=stream)
    stack.until(lambda: len(fake.plans) > 5, "the answer to be under way")
    connection.close()
    stack.until_idle()
    assert len(fake.plans) < 500, "the work went on"
    count = len(fake.plans)
    time.sleep(0.3)
    assert len(fake.plans) == count, "a plan was sent for nobody"
    assert stack.text([7, 8, 9], 5) == stack.text([7, 8, 9], 5)


def test_leaving_before_the_first_token_and_while_waiting(start: Callable[..., Any]) -> None:
    stack = start("--max-num-seqs", "1")
    fake = stack.fake()
    stack.ready()
    fake.hold()
    running = send_request(stack.url, prompt=[7, 8, 9], max_tokens=900, stream=True)
    stack.until(lambda: fake.plans, "the first plan")
    waiting = send_request(stack.url, prompt=[17, 8, 9], max_tokens=900)
    stack.until(lambda: stack.metric("vllm:num_requests_waiting") == 1, "the second to wait")
    waiting.close()
    running.close()
    stack.until(lambda: stack.metric("gilir_live_sequences") == 0, "both to be dropped")
    fake.release()
    stack.until_idle()
    assert len(fake.plans) == 1, "a plan was sent for nobody"


def test_leaving_half_way_through_a_chunked_prefill(start: Callable[..., Any]) -> None:
    stack = start("--max-num-batched-tokens", "16")
    fake = stack.fake()
    stack.ready()
    prompt = [(7 * i) % 500 + 5 for i in range(160)]
    fake.hold()
    connection = send_request(stack.url, prompt=prompt, max_tokens=50)
    for _ in range(4):
        fake.release(1)
    fake.wait_plans(5)
    # Metrics lag: the request must be seen there before it can be seen to have gone.
    stack.until(lambda: stack.metric("gilir_live_sequences") == 1, "the request to be counted")
    connection.close()
    stack.until(lambda: stack.metric("gilir_live_sequences") == 0, "the request to be dropped")
    fake.release()
    stack.until_idle()
    assert len(fake.plans) == 5
    # What was computed is reused, what was not is not.
    answer = stack.complete(prompt, 4).json()
    assert 0 < answer["usage"]["prompt_tokens_details"]["cached_tokens"] <= 5 * 16
    assert fake.runner.pseudo.num_corrupt == 0


def test_a_batch_mate_does_not_notice(start: Callable[..., Any]) -> None:
    stack = start()
    fake = stack.fake()
    stack.ready()
    alone = stack.text([50, 60, 70], 30)
    stack.until_idle()
    fake.hold()
    leaver = send_request(stack.url, prompt=[7, 8, 9], max_tokens=900)
    stack.until(lambda: stack.metric("gilir_live_sequences") == 1, "the leaver to arrive")
    events = stack.stream([50, 60, 70], 30)
    first = None

    def read() -> None:
        nonlocal first
        first = "".join(choice["text"] for event in events for choice in event["choices"])

    reader = threading.Thread(target=read)
    reader.start()
    stack.until(lambda: stack.metric("gilir_live_sequences") == 2, "both to be there")
    fake.release(3)
    fake.wait_plans(len(fake.plans))
    leaver.close()
    stack.until(lambda: stack.metric("gilir_live_sequences") == 1, "the leaver to be dropped")
    fake.release()
    reader.join(60)
    assert first == alone
    stack.until_idle()
