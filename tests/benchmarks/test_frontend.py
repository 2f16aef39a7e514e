"""The frontend benchmark counts what its client reads, and keeps running."""

from __future__ import annotations

import json

import pytest

from benchmarks import frontend
from benchmarks.stream_client import MARKS, Answers, ClientError

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(*events: str) -> bytes:
    body = "".join(f"data: {event}\n\n" for event in events).encode()
    return b"%x\r\n%b\r\n" % (len(body), body)


def choice(text: str) -> str:
    return json.dumps({"choices": [{"index": 0, "text": text}]}, separators=(",", ":"))


STREAM = HEAD + chunk(choice(" word")) + chunk(choice(" word word"), choice("")) + chunk("[DONE]") + b"0\r\n\r\n"


@pytest.mark.parametrize("size", [1, 2, 7, 64, len(STREAM), 2 * len(STREAM)])
def test_events_are_counted_however_the_bytes_come(size: int) -> None:
    answers, data = Answers(MARKS["completions"]), 2 * STREAM
    ended = [answers.take(data[place : place + size]) for place in range(0, len(data), size)]
    assert (answers.events, answers.characters) == (4, 2 * len(" word word word"))
    assert ended[-1] and sum(ended) == (1 if size > len(STREAM) else 2)


@pytest.mark.parametrize("data", [b"HTTP/1.1 500 X\r\n\r\n", HEAD + chunk('{"error":{}}')])
def test_what_is_no_answer_is_an_error(data: bytes) -> None:
    with pytest.raises(ClientError):
        Answers(MARKS["completions"]).take(data)


def test_every_token_of_the_script_is_as_long_as_the_floors_text() -> None:
    assert len(frontend.alphabet()) > 100


@pytest.mark.nightly
@pytest.mark.parametrize("api", ["completions", "chat"])
def test_the_benchmark_gives_all_figures(api: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--streams", "4", "--frontends", "2", "--api", api, "--seconds", "0.5", "--iteration-ms", "2"]
    assert frontend.main([*flags, "--floor", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert found["streams"] == 4 and found["tokens_per_s"] > 0 and found["health_p99_ms"] > 0
    assert 0 < found["chunks_per_s"] <= found["tokens_per_s"] + 1 and found["floor_tokens_per_s"] > 0
    assert set(found["cpu_us_per_token"]) == {"frontend", "core", "executor", "client"}
