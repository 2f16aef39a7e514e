"""A client that leaves frees what it held, at once, streaming or not (C05); slow readers are dropped (C35)."""

from __future__ import annotations

import errno
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from fake_core import Answer
from frontend_service import BYTE_LEVEL, Service, error_of, events, run_service, wait_until
from tokenizers_for_tests import CHATML, byte_level, card

from common.wire import EndReason


def connect(service: Service, path: str, receive_buffer: int = 0, **body: Any) -> socket.socket:
    """Send a request and leave the answer unread."""
    address = urlsplit(service.url)
    connection = socket.socket()
    if receive_buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.connect((address.hostname, address.port))
    content = json.dumps({"model": BYTE_LEVEL, **body}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(content)}\r\n\r\n"
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
    service.core.answer(Answer())
    connection.close()
    # The core hears of the client's going before it hears of a request that was sent some answers later.
    assert [service.get(path).status_code for path in ("/health", "/version", "/health")] == [200] * 3
    assert service.complete().status_code == 200
    assert len(service.core.aborted) == streams and service.core.live == 0


@pytest.mark.parametrize("further", [1, 20])
def test_leaving_with_further_requests_on_the_way_aborts_the_first(service: Service, further: int) -> None:
    service.core.answer(Answer(service.ids("x"), endless=True, gate=threading.Semaphore(0)))
    connection = connect(service, "/v1/completions", prompt="Hello", max_tokens=400)
    connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n" * further)
    assert service.core.wait_for(lambda: service.core.live == 1)
    assert service.get("/health").status_code == 200
    connection.close()
    assert service.core.wait_for(lambda: service.core.live == 0)


def test_leaving_while_the_body_is_still_on_its_way(service: Service) -> None:
    address = urlsplit(service.url)
    connection = socket.create_connection((address.hostname, address.port))
    connection.sendall(b'POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n{"prompt"')
    connection.close()
    assert service.complete().status_code == 200


@pytest.fixture(scope="module")
def roomy_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A vast context, one tokenizer thread, and little patience with slow readers."""
    flags = ("--tokenizer-threads", "1", "--max-unsent-tokens", "64", "--stalled-client-s", "3")
    model = card(BYTE_LEVEL, byte_level(), CHATML, max_model_len=1 << 22)
    with run_service(tmp_path_factory.mktemp("ipc"), *flags, models=[model], kv_capacity=1 << 22) as service:
        yield service


@pytest.fixture
def roomy(roomy_service: Service) -> Service:
    roomy_service.core.reset()
    return roomy_service


def test_leaving_or_running_late_during_tokenization(roomy: Service) -> None:
    """The one tokenizer thread is busy: requests in its queue whose client leaves or whose time is over are dropped,
    and never reach the core.
    """
    body = json.dumps({"model": BYTE_LEVEL, "prompt": "lazy dog " * 1000, "max_tokens": 1}).encode()
    for repeats in (60_000, 120_000, 240_000):  # about a second; a machine that is done too soon gets more to do
        roomy.core.reset()
        before = thread_seconds(roomy.process.pid)
        busy = connect(roomy, "/v1/completions", prompt="The quick brown fox " * repeats, max_tokens=1)
        wait_until(lambda before=before: thread_seconds(roomy.process.pid) > before + 0.03, 60)
        waiting = connect(roomy, "/v1/completions", prompt="lazy dog " * 1000, max_tokens=1)
        waiting.close()
        late = roomy.raw("/v1/completions", body, **{"X-Request-Timeout": "0.1"})
        was_busy = not roomy.core.requests
        assert roomy.core.wait_for(lambda: bool(roomy.core.requests), 60)
        busy.settimeout(60)
        assert busy.recv(100)
        if was_busy:
            break
    assert was_busy, "the thread was free all the time, or took the small ones first"
    assert error_of(late, 504)["code"] == "request_timeout" and "connection" not in late.headers
    assert roomy.complete(prompt="Hello " * 2000, max_tokens=1).status_code == 200
    assert [len(request.prompt) > 100_000 for request in roomy.core.requests] == [True, False]
    assert roomy.core.requests[1].prompt.tolist() == roomy.ids("Hello " * 2000)


def thread_seconds(pid: int) -> float:
    """CPU time of a process's threads other than its first, in which the event loop runs: that of a tokenizer."""
    threads = psutil.Process(pid).threads()
    return float(sum(thread.user_time + thread.system_time for thread in threads if thread.id != pid))


@pytest.mark.parametrize("stream", [True, False], ids=["it falls too far behind", "it does not read the answer"])
def test_a_slow_reader_is_dropped_and_slows_nobody(roomy: Service, stream: bool) -> None:
    # Twenty logprobs a token fill the buffers of the connection soon.
    scores = [(token, -1.5) for token in range(3, 24)]
    roomy.core.answer(Answer([3] * 1000, EndReason.EOS, endless=stream, scores=[scores]))
    roomy.core.interval_s = 0.001
    body = {"prompt": "Hello", "max_tokens": 1 << 21, "stream": stream, "logprobs": 20}
    slow = [connect(roomy, "/v1/completions", 4096, **body) for _ in range(5)]
    assert roomy.core.wait_for(lambda: len(roomy.core.requests) == 5)
    roomy.core.answer(Answer([*roomy.ids(" one two"), roomy.eos()]))
    quick = events(roomy.complete(stream=True))
    assert quick[-1]["choices"][0]["finish_reason"] == "stop"
    assert roomy.core.wait_for(lambda: roomy.core.live == 0, 60)
    for connection in slow:
        wait_until(lambda connection=connection: _is_reset(connection))
    assert roomy.complete().status_code == 200


def test_a_reader_that_pauses_gets_all_of_it_in_fewer_events(roomy: Service) -> None:
    count = 600
    roomy.core.answer(Answer([3] * count, EndReason.LENGTH, scores=[[(token, -1.5) for token in range(3, 24)]]))
    body = {"prompt": "Hello", "max_tokens": count, "stream": True, "logprobs": 20}
    with connect(roomy, "/v1/completions", 4096, **body) as pausing:
        assert roomy.core.wait_for(lambda: bool(roomy.core.requests) and roomy.core.live == 0, 60)
        answer = b""
        while not answer.endswith(b"\r\n0\r\n\r\n"):
            answer += pausing.recv(1 << 20)
    chunks = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith(b"data: {")]
    logprobs = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    assert sum(len(told["tokens"]) for told in logprobs) == count
    assert 10 < len(logprobs) < count / 2


def _is_reset(connection: socket.socket) -> bool:
    """Whether the far side broke the connection; what it had sent stays unread."""
    return connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNRESET
