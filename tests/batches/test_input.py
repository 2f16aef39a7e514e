"""What is a request in an input file, and what is said of the other lines."""

from __future__ import annotations

import json
from typing import Any

import pytest

from scheduler_svc.batches import input as input_module
from scheduler_svc.batches.input import InputFile
from scheduler_svc.batches.store import CheckedLine

GOOD: dict[str, Any] = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


def check(*lines: bytes) -> tuple[InputFile, list[CheckedLine]]:
    source, placed, place = InputFile("batch_1", "/v1/completions", 1000), [], 0
    for line in lines:
        placed.append((place, line))
        place += len(line) + 1
    return source, list(source.check(placed))


def line(**changes: Any) -> bytes:
    return json.dumps({key: value for key, value in (GOOD | changes).items() if value is not None}).encode()


def test_good_lines_keep_their_numbers_and_places_in_the_file() -> None:
    first, second = line(), line(custom_id="b")
    source, lines = check(b"\xef\xbb\xbf" + first, b"  \r", second + b"\r", b"")
    assert [(one.number, one.custom_id, one.bad) for one in lines] == [(1, "a", None), (3, "b", None)]
    assert (lines[0].place, lines[0].length) == (3, len(first))
    assert lines[1].place == 3 + len(first) + 1 + 3 + 1
    assert (source.total, source.failed, source.failure()) == (2, 0, [])


@pytest.mark.parametrize(
    ("bad", "code", "param"),
    [
        (b"{", "invalid_json", None),
        (b"\xff", "invalid_json", None),
        (b"[1]", "invalid_json", None),
        (line(custom_id=None), "missing_custom_id", "custom_id"),
        (line(custom_id=7), "invalid_request", "custom_id"),
        (line(custom_id="x" * 513), "invalid_request", "custom_id"),
        (line(custom_id="\0"), "invalid_request", "custom_id"),
        (line(custom_id="x\0"), "invalid_request", "custom_id"),
        (line(custom_id="a"), "duplicate_custom_id", "custom_id"),
        (line(custom_id="b", method="GET"), "invalid_method", "method"),
        (line(custom_id="b", url="/v1/chat/completions"), "mismatched_endpoint", "url"),
        (line(custom_id="b", body=None), "missing_body", "body"),
        (line(custom_id="b", body=[]), "invalid_request", "body"),
        (line(custom_id="b", body={"prompt": "x", "stream": True}), "unsupported_parameter", "stream"),
        (line(custom_id="b", body={"prompt": "x" * 1000}), "request_too_large", None),
        (b'{"custom_id": "b", "body": {"prompt": "x", "temperature": NaN}}', None, "body"),
    ],
)
def test_a_bad_line_says_what_is_wrong_and_harms_no_other(bad: bytes, code: str | None, param: str | None) -> None:
    source, lines = check(line(), bad, line(custom_id="c"))
    assert [one.bad is None for one in lines] == [True, False, True]
    result = json.loads(lines[1].bad or b"")
    assert result["response"] is None and result["error"]["message"]
    assert result["error"]["code"] == (code or "invalid_request")
    assert source.errors[0]["line"] == 2 and source.errors[0]["param"] == param
    assert source.failure() == [] and source.failed == 1


def test_a_file_without_a_request_fails_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check(b"", b" ")[0].failure()[0]["code"] == "empty_file"
    source, _ = check(b"{", line(method="PUT"))
    assert [(error["line"], error["code"]) for error in source.failure()] == [
        (1, "invalid_json"),
        (2, "invalid_method"),
    ]
    monkeypatch.setattr(input_module, "MAX_LINES", 2)
    source, lines = check(line(), line(custom_id="b"), line(custom_id="c"), line(custom_id="d"))
    assert source.failure()[0]["code"] == "too_many_requests" and len(lines) == 2


def test_the_model_of_a_batch_is_that_of_all_its_lines() -> None:
    named = {"model": "m", "prompt": "x"}
    assert check(line(body=named), line(custom_id="b", body=named))[0].model == "m"
    assert check(line(body=named), line(custom_id="b"))[0].model is None
