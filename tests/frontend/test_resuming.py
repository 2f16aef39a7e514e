"""A client whose connection breaks takes its answer up again, at any frontend: nothing twice, nothing lost."""

from __future__ import annotations

import json
import random
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from fake_core import Answer
from frontend_service import Service, error_of, events, wait_until
from tokenizers_for_tests import TOOL_CHAT, byte_level, card

from common.wire import EndReason

MODEL = "tools"
DONE = b"[DONE]\n\n"
HEADERS = {"X-Gilir-Resumable": "true"}
CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
CALL = 'So: <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
TOOLS = {"tools": [{"type": "function", "function": {"name": "f"}}]}
USAGE = {"stream_options": {"include_usage": True}}
KINDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat": ("/v1/chat/completions", CHAT, " one two three"),
    "completions": ("/v1/completions", {"prompt": "Hello", "n": 2, **USAGE}, " one two three"),
    "tools": ("/v1/chat/completions", {**CHAT, **TOOLS}, CALL),
    "scores": ("/v1/completions", {"prompt": "Hello", "logprobs": 1}, " 世界 x"),
}


@dataclass
class Pair:
    """Two frontends of one core."""

    first: Service
    url: str
    """Of the second."""
    second: subprocess.Popen[str]

    @property
    def urls(self) -> tuple[str, str]:
        return self.first.url, self.url


@pytest.fixture(scope="module")
def module_pair(shared_service: Service) -> Iterator[Pair]:
    first, usual = shared_service, shared_service.core.models
    first.core.announce([*usual, card(MODEL, byte_level(), TOOL_CHAT)], 100_000)
    flags = ["--core", first.core.address, "--name", "frontend-1", "--port", "0"]
    command = [sys.executable, "-m", "scheduler_svc.frontend", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as second:
        try:
            assert second.stdout is not None
            url = second.stdout.readline().removeprefix("listening: ").strip()
            for served in (first.url, url):
                wait_until(lambda served=served: MODEL in first.get(f"{served}/v1/models").text, 60)
            yield Pair(first, url, second)
        finally:
            second.kill()
            first.core.end_all()
            first.core.announce(usual, 100_000)
            wait_until(lambda: MODEL not in first.get("/v1/models").text)


@pytest.fixture
def pair(module_pair: Pair) -> Pair:
    module_pair.first.core.reset()
    return module_pair


class Reader:
    """A connection that reads an answer as it comes, and can be broken anywhere in it."""

    def __init__(self, url: str, method: str, path: str, body: Any = None, **headers: str) -> None:
        address = urlsplit(url)
        self._socket = socket.create_connection((address.hostname, address.port or 80), timeout=60)
        content = b"" if body is None else json.dumps(body).encode()
        lines = [f"{method} {path} HTTP/1.1", "host: localhost", f"content-length: {len(content)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self._socket.sendall("\r\n".join([*lines, "", ""]).encode() + content)
        self._raw = b""

    def poll(self) -> None:
        """Take what comes in a moment."""
        self._socket.settimeout(0.02)
        try:
            self._raw += self._socket.recv(1 << 16)
        except TimeoutError:
            pass
        finally:
            self._socket.settimeout(20)

    def rest(self) -> bytes:
        """The whole body, when it has come."""
        while not self._raw.endswith(b"\r\n0\r\n\r\n"):
            data = self._socket.recv(1 << 16)
            assert data, self._raw[-500:]
            self._raw += data
        return self.body

    @property
    def status(self) -> int:
        while b"\r\n\r\n" not in self._raw:
            self._raw += self._socket.recv(1 << 16)
        return int(self._raw.split(b" ", 2)[1])

    @property
    def body(self) -> bytes:
        """What has come of it."""
        _, _, coded = self._raw.partition(b"\r\n\r\n")
        body = b""
        while b"\r\n" in coded:
            size, _, coded = coded.partition(b"\r\n")
            body += coded[: int(size, 16)]
            coded = coded[int(size, 16) + 2 :]
        return body

    def close(self) -> None:
        self._socket.close()


def whole_events(body: bytes) -> list[bytes]:
    """The events of which all has come."""
    return [event + b"\n\n" for event in body.split(b"\n\n")[:-1]]


def begin(url: str, kind: str, request_id: str, **headers: str) -> Reader:
    path, body, _ = KINDS[kind]
    body = {**body, "stream": True, "model": MODEL, "max_tokens": 100}
    return Reader(url, "POST", path, body, **{**HEADERS, "X-Request-Id": request_id, **headers})


def resume(url: str, request_id: str, after: int | None, **headers: str) -> Reader:
    last = {} if after is None else {"Last-Event-ID": str(after)}
    return Reader(url, "GET", f"/v1/requests/{request_id}/stream", **last, **headers)


def meaning(body: bytes) -> dict[str, Any]:
    """What the events say together, however many there are: text that has come at once is told in one."""
    told: dict[str, Any] = {}
    for event in whole_events(body)[:-1]:
        chunk = json.loads(event[event.index(b"data: ") + 6 :])
        told["usage"] = chunk.get("usage")
        for choice in chunk["choices"]:
            for key, value in _leaves(choice.get("delta", {"text": choice.get("text")})):
                place = f"{choice['index']} {key}"
                told[place] = told.get(place, "") + value
            told[f"{choice['index']} ends"] = choice["finish_reason"]
            scores = choice["logprobs"] or {"tokens": []}
            told.setdefault(f"{choice['index']} tokens", []).extend(scores["tokens"])
    assert body.endswith(b"data: [DONE]\n\n")
    return told


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            if key != "id":
                yield from _leaves(inner, f"{path}.{key}")
    elif isinstance(value, str):
        yield path, value


def script(pair: Pair, kind: str, gate: threading.Semaphore | None = None) -> None:
    ids = pair.first.ids(KINDS[kind][2])
    scores = [[(token, -0.5), (5, -1.5)] for token in ids] if kind == "scores" else []
    pair.first.core.answer(Answer(ids, scores=scores, gate=gate))


def unbroken(pair: Pair, kind: str) -> bytes:
    """A resumable stream that is read in one go: but for the ids of its events as any other."""
    script(pair, kind)
    path, body, _ = KINDS[kind]
    plain = pair.first.post(path, **body, model=MODEL, stream=True, max_tokens=100)
    assert events(plain)
    told = begin(pair.first.url, kind, f"{kind}-unbroken").rest()
    check_numbers(told)
    assert meaning(told) == meaning(plain.content)
    return told


def check_numbers(body: bytes) -> None:
    """Each event has its number, from 1 on."""
    numbers = [int(number) for number in re.findall(rb"^id: (\d+)\n", body, re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) == len(whole_events(body))


def break_after(reader: Reader, number: int, go_on: Callable[[], object]) -> list[bytes]:
    """Read until so many events are there, letting the core go on where it must, and break the connection."""
    while len(whole_events(reader.body)) < number and DONE not in reader.body:
        go_on()
        reader.poll()
    reader.close()
    return whole_events(reader.body)[:number]


@pytest.mark.parametrize("kind", KINDS)
def test_broken_at_every_event_the_answer_is_whole(pair: Pair, kind: str) -> None:
    """At either frontend, while the core has more to say; the client may have seen less than it was sent."""
    whole = unbroken(pair, kind)
    for number in range(len(whole_events(whole))):
        gate = threading.Semaphore(0)
        script(pair, kind, gate)
        request_id = f"{kind}-{number}"
        reader = begin(pair.first.url, kind, request_id)
        assert pair.first.core.wait_for(lambda: pair.first.core.live > 0)
        begun = break_after(reader, number, gate.release)
        second = resume(pair.urls[number % 2], request_id, len(begun) or None)
        gate.release(100)
        joined = b"".join(begun) + second.rest()
        check_numbers(joined)
        assert meaning(joined) == meaning(whole)
        assert joined == resume(pair.urls[1 - number % 2], request_id, 0).rest()


def test_a_response_is_resumed_as_any_other_stream(pair: Pair) -> None:
    gate = threading.Semaphore(1)
    script(pair, "chat", gate)
    body = {"model": MODEL, "input": "Hello", "stream": True}
    reader = Reader(pair.urls[0], "POST", "/v1/responses", body, **HEADERS, **{"X-Request-Id": "response"})
    begun = break_after(reader, 3, gate.release)
    gate.release(100)
    rest = [resume(url, "resp_response", 3).rest() for url in pair.urls]
    assert rest[0] == rest[1] and b"response.completed" in whole_events(rest[0])[-1]
    joined = b"".join(begun) + rest[0]
    check_numbers(joined)
    numbers = [json.loads(event.split(b"data: ", 1)[1])["sequence_number"] for event in whole_events(joined)]
    assert numbers == list(range(len(numbers)))


def test_broken_anywhere_and_again_and_again(pair: Pair) -> None:
    """At random bytes, so that an event may have come in part."""
    dice, whole = random.Random(7), unbroken(pair, "completions")
    for attempt in range(8):
        gate = threading.Semaphore(0)
        script(pair, "completions", gate)
        request_id, got = f"again-{attempt}", b""
        reader = begin(pair.urls[0], "completions", request_id)
        while not got.endswith(DONE):
            more = dice.randrange(1, 900)
            while len(reader.body) < more and DONE not in reader.body:
                gate.release()
                reader.poll()
            reader.close()
            got += b"".join(whole_events(reader.body[:more]))
            last = len(whole_events(got))
            reader = resume(pair.urls[dice.randrange(2)], request_id, last)
        check_numbers(got)
        assert meaning(got) == meaning(whole) and reader.status == 204


@pytest.mark.parametrize("place", [0, 1], ids=["here", "at the other frontend"])
def test_a_second_reader_takes_the_stream_over(pair: Pair, place: int) -> None:
    gate = threading.Semaphore(1)
    script(pair, "chat", gate)
    first = begin(pair.urls[0], "chat", f"taken-{place}")
    assert first.status == 200
    second = resume(pair.urls[place], f"chatcmpl-taken-{place}", None)
    last = whole_events(first.rest())[-2:]
    assert b"stream_taken" in last[0] and last[1] == b"data: [DONE]\n\n"
    third = resume(pair.urls[1 - place], f"taken-{place}", None)
    assert b"stream_taken" in second.rest()
    gate.release(100)
    assert meaning(third.rest()) == meaning(unbroken(pair, "chat"))


@pytest.mark.parametrize("place", [0, 1], ids=["here", "at the other frontend"])
def test_who_leaves_again_loses_nothing_and_the_work_goes_on(pair: Pair, place: int) -> None:
    gate = threading.Semaphore(1)
    script(pair, "chat", gate)
    begin(pair.urls[0], "chat", f"left-{place}").close()
    assert pair.first.core.wait_for(lambda: pair.first.core.live == 1)
    second = resume(pair.urls[place], f"left-{place}", None)
    assert second.status == 200
    second.close()
    gate.release(100)
    assert pair.first.core.wait_for(lambda: pair.first.core.live == 0)
    assert pair.first.core.aborted == []
    assert meaning(resume(pair.urls[place], f"left-{place}", 0).rest()) == meaning(unbroken(pair, "chat"))


@pytest.mark.parametrize("place", [0, 1], ids=["here", "at the other frontend"])
def test_mistakes_are_told_plainly(pair: Pair, place: int) -> None:
    script(pair, "chat")
    request_id = f"mistakes-{place}"
    last = len(whole_events(begin(pair.urls[0], "chat", request_id, **{"X-Tenant": "a"}).rest()))
    path = f"{pair.urls[place]}/v1/requests/{request_id}/stream"

    def ask(after: str, tenant: str = "a", **params: str) -> httpx.Response:
        return pair.first.client.get(path, headers={"Last-Event-ID": after, "X-Tenant": tenant}, params=params)

    for wrong in ("x", "-1", "1.5", "1" * 20, str(last + 1)):
        assert error_of(ask(wrong), 400)["param"] == "Last-Event-ID"
    for stranger in (ask("0", "b"), pair.first.get(path), pair.first.get(path.replace("mistakes", "nobody"))):
        assert error_of(stranger, 404)["code"] == "stream_not_found"
    assert ask(str(last)).status_code == 204 == ask("", last_event_id=str(last)).status_code
    assert ask("", last_event_id=str(last - 1)).text == f"id: {last}\ndata: [DONE]\n\n"
    assert len(whole_events(ask("0", last_event_id=str(last)).content)) == last


@pytest.mark.parametrize("place", [0, 1], ids=["here", "at the other frontend"])
def test_an_answer_that_is_an_error_is_told_again(pair: Pair, place: int) -> None:
    pair.first.core.answer(Answer([], EndReason.QUEUE_FULL, message="full", retry_after_s=7))
    assert begin(pair.urls[0], "chat", f"full-{place}").status == 429
    again = pair.first.get(f"{pair.urls[place]}/v1/requests/full-{place}/stream")
    assert error_of(again, 429)["code"] == "queue_full" and again.headers["retry-after"] == "7"
    gate = threading.Semaphore(1)
    pair.first.core.answer(Answer(pair.first.ids(" one two"), EndReason.FAILED, message="broken", gate=gate))
    reader = begin(pair.urls[0], "chat", f"failed-{place}")
    assert reader.status == 200
    gate.release(100)
    told = reader.rest()
    assert b"broken" in whole_events(told)[-2]
    assert resume(pair.urls[place], f"failed-{place}", None).rest() == told


def test_what_did_not_ask_for_it_ends_with_its_connection(pair: Pair) -> None:
    pair.first.core.answer(Answer(pair.first.ids("x"), endless=True, gate=threading.Semaphore(0)))
    for headers in ({"X-Gilir-Resumable": "false"}, {"X-Gilir-Resumable": "true", "stream": "no"}):
        body = {"model": MODEL, "prompt": "Hello", "max_tokens": 100, "stream": "stream" not in headers}
        reader = Reader(pair.urls[0], "POST", "/v1/completions", body, **{**headers, "X-Request-Id": "unasked"})
        assert pair.first.core.wait_for(lambda: pair.first.core.live == 1)
        reader.close()
        assert pair.first.core.wait_for(lambda: pair.first.core.live == 0)
        assert resume(pair.urls[0], "unasked", None).status == 404
    wrong = pair.first.raw(
        "/v1/completions", b'{"model": "tools", "prompt": "Hello"}', **{"X-Gilir-Resumable": "maybe"}
    )
    assert error_of(wrong, 400)["param"] == "X-Gilir-Resumable"


def test_the_newest_of_one_id_is_meant_wherever_it_is(pair: Pair) -> None:
    for place, text in ((0, " one"), (1, " two"), (0, " three")):
        pair.first.core.answer(Answer(pair.first.ids(text)))
        told = begin(pair.urls[place], "chat", "same").rest()
        assert meaning(told)["0 .content"] == text
        for url in pair.urls:
            assert resume(url, "same", None).rest() == told


def test_frontends_that_hang_or_die_lose_their_own_streams_only(pair: Pair) -> None:
    """The last test: it kills the second frontend."""
    ids = pair.first.ids("x")
    pair.first.core.script = lambda _request, _i: Answer(ids, endless=True, gate=threading.Semaphore(1))
    assert begin(pair.url, "chat", "there").status == begin(pair.first.url, "chat", "mine").status == 200
    proxied = resume(pair.first.url, "there", None)
    assert proxied.status == 200
    pair.second.send_signal(signal.SIGSTOP)
    assert resume(pair.first.url, "mine", None).status == 200
    pair.second.kill()
    pair.second.wait()
    assert b'"lost"' in whole_events(proxied.rest())[-2]
    assert resume(pair.first.url, "there", None).status == 404
    assert resume(pair.first.url, "mine", None).status == 200
