"""A client that leaves frees what it held, at once, streaming or not (C05); slow readers are dropped (C35)."""

from __future__ import annotations

import json
import socket
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from fake_core import Answer
from frontend_service import BYTE_LEVEL, Service, events, run_service, wait_until
from tokenizers_for_tests import CHATML, byte_level, card


def connect(service: Service, path: str, receive_buffer: int = 0, **body: Any) -> socket.socket:
    """Send a request and leave the answer unread."""
    address = urlsplit(service.url)
    connection = socket.socket()
    if receive_buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.connect((address.hostname, address.port))
    content = json.dumps({"model": BYTE_LEVEL, **body}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection


CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 400}
REQUESTS: dict[str, tuple[str, dict[str, Any], int]] = {
    "completion": ("/v1/completions", {"prompt": "Hello", "max_tokens": 400}, 1),
    "several prompts": ("/v1/completions", {"prompt": ["a", "b", "c"], "n": 2, "max_tokens": 400}, 6),
    "with stop": ("/v1/completions", {"prompt": "Hello", "stop": "zzz", "max_tokens": 400}, 1),
    "chat": ("/v1/chat/completions", CHAT, 1),
    "chat of several choices": ("/v1/chat/completions", {**CHAT, "n": 3}, 3),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", REQUESTS)
@pytest.mark.parametrize("moment", ["before the first token", "in the middle"])
def test_leaving_aborts_every_sequence(service: Service, kind: str, stream: bool, moment: str) -> None:
    path, body, streams = REQUESTS[kind]
    gate = threading.Semaphore(0)
    service.core.answer(Answer(service.ids("x"), endless=True, gate=gate))
    connection = connect(service, path, **body, stream=stream)
    assert service.core.wait_for(lambda: service.core.live == streams)
    if moment == "in the middle":
        for _ in range(5 * streams):
            gate.release()
        if stream:
            assert connection.recv(100)
    left = time.monotonic()
    connection.close()
    assert service.core.wait_for(lambda: service.core.live == 0)
    assert time.monotonic() - left < 1
    assert len(service.core.aborted) == streams


def test_leaving_while_the_body_is_still_on_its_way(service: Service) -> None:
    address = urlsplit(service.url)
    connection = socket.create_connection((address.hostname, address.port))
    connection.sendall(b'POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{"prompt"')
    connection.close()
    assert service.complete().status_code == 200


def test_leaving_during_tokenization(tmp_path: Path) -> None:
    """The one tokenizer thread is busy: the request in the queue is dropped, and never reaches the core."""
    large = card(BYTE_LEVEL, byte_level(), CHATML, max_model_len=1 << 22)
    with run_service(tmp_path, "--tokenizer-threads", "1", models=[large], kv_capacity=1 << 22) as service:
        busy = connect(service, "/v1/completions", prompt="The quick brown fox " * 60_000, max_tokens=1)
        waiting = connect(service, "/v1/completions", prompt="lazy dog " * 1000, max_tokens=1)
        waiting.close()
        assert service.core.wait_for(lambda: bool(service.core.requests), 20)
        assert busy.recv(100)
        assert service.complete(prompt="Hello " * 2000, max_tokens=1).status_code == 200
        assert [len(request.prompt) > 100_000 for request in service.core.requests] == [True, False]
        assert len(service.core.requests[1].prompt) < 4 * 2000


@pytest.mark.parametrize("flags", [("--max-unsent-tokens", "64"), ("--stalled-client-s", "0.5")])
def test_a_slow_reader_is_dropped_and_slows_nobody(tmp_path: Path, flags: tuple[str, str]) -> None:
    large = card(BYTE_LEVEL, byte_level(), CHATML, max_model_len=1 << 22)
    with run_service(tmp_path, *flags, models=[large], kv_capacity=1 << 22) as service:
        # Twenty logprobs a token fill the buffers of the connection soon.
        scores = [(token, -1.5) for token in range(3, 24)]
        service.core.answer(Answer([3], endless=True, scores=[scores]))
        service.core.interval_s = 0.001
        body = {"prompt": "Hello", "max_tokens": 1 << 21, "stream": True, "logprobs": 20}
        slow = [connect(service, "/v1/completions", 4096, **body) for _ in range(5)]
        assert service.core.wait_for(lambda: service.core.live == 5)
        service.core.answer(Answer([*service.ids(" one two"), service.eos()]))
        quick = events(service.complete(stream=True))
        assert quick[-1]["choices"][0]["finish_reason"] == "stop"
        assert service.core.wait_for(lambda: service.core.live == 0, 30)
        for connection in slow:
            connection.settimeout(5)
            wait_until(lambda connection=connection: _is_broken(connection))
        assert service.complete().status_code == 200


def _is_broken(connection: socket.socket) -> bool:
    """Read what is still there; at the end the connection is found to be reset."""
    try:
        return not connection.recv(1 << 20)
    except ConnectionResetError:
        return True
