"""Huge, long and odd bodies: refused as early as can be, while health checks and streams go on (C25)."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import httpx
import pytest
from fake_core import Answer
from frontend_service import BYTE_LEVEL, Service, error_of

from scheduler_svc.http.body import parse_fields
from scheduler_svc.http.errors import ApiError

MEGABYTE = 1 << 20


@pytest.fixture
def busy_service(service: Service) -> Iterator[Service]:
    """One stream runs meanwhile, and health is asked for; at the end both must have gone well."""
    service.core.interval_s = 0.005
    service.core.answer(Answer(service.ids("x"), endless=True))
    over = threading.Event()
    problems: list[object] = []

    def poll() -> None:
        with httpx.Client(base_url=service.url) as client:
            while not over.wait(0.02):
                if client.get("/health").status_code != 200:
                    problems.append("unhealthy")

    def stream() -> None:
        body = {"model": BYTE_LEVEL, "prompt": "Hello", "max_tokens": 50, "stream": True, "ignore_eos": True}
        while not over.is_set():
            with httpx.stream("POST", service.url + "/v1/completions", json=body, timeout=60) as response:
                if not response.read().endswith(b"data: [DONE]\n\n"):
                    problems.append("a broken stream")

    threads = [threading.Thread(target=poll), threading.Thread(target=stream)]
    for thread in threads:
        thread.start()
    assert service.core.wait_for(lambda: service.core.live > 0)
    yield service
    over.set()
    for thread in threads:
        thread.join()
    assert not problems


def body(**fields: object) -> bytes:
    return json.dumps({"model": BYTE_LEVEL, "max_tokens": 1, **fields}).encode()


def test_large_bodies(busy_service: Service) -> None:
    service, before = busy_service, len(busy_service.core.requests)
    text = "lazy dog. " * MEGABYTE
    user = {"role": "user", "content": text}
    turns = [{"role": "user", "content": "Hello"}] * 10_000
    for path, content in (
        ("/v1/completions", body(prompt=text)),
        ("/v1/completions", body(prompt=["Hello", text])),
        ("/v1/completions", body(prompt=[5] * MEGABYTE)),
        ("/v1/chat/completions", body(messages=[user])),
        ("/v1/chat/completions", body(messages=turns)),
    ):
        assert error_of(service.raw(path, content), 400)["code"] == "context_length_exceeded"
    assert error_of(service.raw("/v1/completions", b'{"prompt": ' + b"[" * 100_000), 400)
    assert error_of(service.raw("/v1/completions", b'{"prompt": ' + b"[" * (10 * MEGABYTE)), 413)
    assert error_of(service.raw("/v1/completions", body(prompt=[5] * (3 * MEGABYTE))), 413)
    assert all(len(request.prompt) < 10 for request in service.core.requests[before:])


def test_bodies_over_the_limit_are_refused_whether_announced_or_not(busy_service: Service) -> None:
    service = busy_service
    content = body(prompt="x" * (50 * MEGABYTE))
    assert error_of(service.raw("/v1/completions", content), 413)["code"] == "request_too_large"

    def chunks() -> Iterator[bytes]:
        for start in range(0, len(content), MEGABYTE):
            yield content[start : start + MEGABYTE]

    response = service.client.post("/v1/completions", content=chunks())
    assert error_of(response, 413)["code"] == "request_too_large"


def test_many_short_prompts(busy_service: Service) -> None:
    response = busy_service.raw("/v1/completions", body(prompt=["the lazy dog " * 20] * 256))
    assert len(response.json()["choices"]) == 256


def test_a_long_prompt_that_fits_is_tokenized_in_a_thread(service: Service) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 40
    ids = service.ids(text)
    assert len(text) < 4096 < len(text) * 3 and len(ids) < 500
    service.complete(prompt=text, max_tokens=1)
    service.complete(prompt=[text, text, text], max_tokens=1)
    assert [request.prompt.tolist() for request in service.core.requests] == [ids] * 4


def test_a_body_of_many_brackets_is_refused_before_it_is_parsed() -> None:
    nested = b"[" * 500 + b"]" * 500
    body = b'{"prompt":"a","x":[' + b",".join([nested] * 600) + b"]}"
    with pytest.raises(ApiError) as caught:
        parse_fields(body)
    assert caught.value.status == 413
