"""Multipart forms, as they come in pieces of any size."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import pytest

from scheduler_svc.frontend.batching import upload
from scheduler_svc.frontend.batching.upload import MAX_FORM_BYTES, WRITE_BYTES, UploadForm, clean_filename, read_expiry
from scheduler_svc.http.body_budget import BodyBudget
from scheduler_svc.http.errors import ApiError

CONTENT = b'{"a": "\r\n--b\r\n"}\n' * 1000


def form(*parts: tuple[str, bytes], end: bytes = b"--b--\r\n") -> bytes:
    return (
        b"".join(f"--b\r\nContent-Disposition: {head}\r\n\r\n".encode() + data + b"\r\n" for head, data in parts) + end
    )


FILE = 'form-data; name="file"; filename="in.jsonl"\r\nContent-Type: application/jsonl'
WHOLE = form(('form-data; name="purpose"', b"batch"), (FILE, CONTENT.replace(b"--b", b"--c")))


@pytest.mark.parametrize("size", [1, 7, 1000, 1 << 20])
def test_a_form_is_read_whatever_its_pieces(size: int) -> None:
    got, parsed = bytearray(), UploadForm(b"b", 1 << 20)
    for place in range(0, len(WHOLE), size):
        parsed.feed(WHOLE[place : place + size])
        got += parsed.take_content()
    got += parsed.take_content(rest=True)
    assert bytes(got) == CONTENT.replace(b"--b", b"--c") and parsed.size == len(got)
    assert parsed.complete and parsed.fields == {"purpose": "batch"} and parsed.filename == "in.jsonl"


def test_content_is_taken_in_whole_blocks_while_it_comes() -> None:
    data = random.Random(1).randbytes(2 * WRITE_BYTES + 10)
    parsed = UploadForm(b"b", 1 << 30)
    parsed.feed(form((FILE, data)))
    assert parsed.take_content() == data[: 2 * WRITE_BYTES] and parsed.take_content() == b""
    assert parsed.take_content(rest=True) == data[2 * WRITE_BYTES :]


def test_a_file_and_the_rest_of_the_form_have_limits() -> None:
    UploadForm(b"b", 100).feed(form((FILE, b"x" * 100)))
    with pytest.raises(ApiError) as caught:
        UploadForm(b"b", 100).feed(form((FILE, b"x" * 101)))
    assert (caught.value.status, caught.value.code) == (413, "file_too_large")
    with pytest.raises(ApiError) as caught:
        UploadForm(b"b", 100).feed(form(('form-data; name="other"', b"x" * MAX_FORM_BYTES)))
    assert caught.value.status == 413


@pytest.mark.parametrize(
    "body",
    [
        b"no form",
        form((FILE, b"x"), (FILE, b"y")),
        form(('form-data; name="file"', b"x")),
        b"--b\r\nContent-Disposition\xff: x\r\n\r\n\r\n--b--\r\n",
    ],
)
def test_other_bodies_are_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        UploadForm(b"b", 100).feed(body)
    assert caught.value.status == 400


def test_a_form_that_breaks_off_is_not_complete() -> None:
    parsed = UploadForm(b"b", 100)
    parsed.feed(form((FILE, b"x"), end=b""))
    assert not parsed.complete


def test_a_filename_is_one_name() -> None:
    assert clean_filename("../../etc/passwd") == "passwd"
    assert clean_filename("C:\\data\\in\0put\n.jsonl") == "input.jsonl"


def test_expiry_is_within_the_bounds() -> None:
    assert read_expiry(None, None) is None
    assert read_expiry("created_at", 3600) == 3600
    for anchor, seconds in (
        (None, 3600), ("created_at", None), ("now", 3600), ("created_at", 3599), ("created_at", True),
        ("created_at", "x"), ("created_at", "3600"), ("created_at", 1e5), ("created_at", [3600]),
        ("created_at", "9" * 5000),
    ):  # fmt: skip
        with pytest.raises(ApiError) as caught:
            read_expiry(anchor, seconds)
        assert caught.value.status == 400


def test_what_waits_to_be_written_counts_among_the_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Piece by piece: a file may be larger than all bodies together."""
    budget, held = BodyBudget(3 * WRITE_BYTES // 2), []
    frontend = SimpleNamespace(bodies=budget, settings=SimpleNamespace(stalled_client_s=5.0, batch_max_tenant_mb=0))
    body = form((FILE, b"x" * (4 * WRITE_BYTES)))

    def request() -> Any:
        places = iter(range(0, len(body), 50_000))

        async def receive() -> dict[str, Any]:
            place = next(places)
            return {
                "type": "http.request",
                "body": body[place : place + 50_000],
                "more_body": place + 50_000 < len(body),
            }

        return SimpleNamespace(receive=receive)

    async def ask(_request: object, _work: object) -> None:
        held.append(budget.num_held)

    monkeypatch.setattr(upload, "frontend_of", lambda _request: frontend)
    monkeypatch.setattr(upload, "ask", ask)

    def receive() -> None:
        asyncio.run(upload._receive(request(), UploadForm(b"b", 1 << 30), "file-1"))

    receive()
    assert len(held) == 4 and min(held) >= WRITE_BYTES and budget.num_held == 0
    with budget.hold() as other, pytest.raises(ApiError) as error:
        other.grow(WRITE_BYTES)
        receive()
    assert error.value.status == 503 and budget.num_held == 0


def test_a_boundary_that_is_too_long_is_the_clients_mistake() -> None:
    with pytest.raises(ApiError) as error:
        UploadForm(b"b" * 60_000, 1 << 20)
    assert error.value.status == 400
