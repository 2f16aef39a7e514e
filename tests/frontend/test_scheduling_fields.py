"""Who asks, how urgent it is, and what may be shared: from body and header to the core."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import httpx
import pytest
from fake_core import Answer
from frontend_service import BYTE_LEVEL, Service, error_of

from common.wire import EndReason, Retention, Submit


def sent(service: Service, ask: str = "complete", **body: Any) -> Submit:
    """What the core gets of a request."""
    assert getattr(service, ask)(**body).status_code == 200
    return service.core.requests[-1]


def with_headers(service: Service, headers: Any, **body: Any) -> httpx.Response:
    whole = {"model": BYTE_LEVEL, "prompt": "Hello", **body}
    return service.client.post("/v1/completions", json=whole, headers=headers)


@pytest.mark.parametrize("ask", ["complete", "chat"])
def test_absent_fields_are_neutral(service: Service, ask: str) -> None:
    request = sent(service, ask)
    assert (request.priority, request.tenant, request.salt, request.deadline_ms) == (0, "", b"", 0)
    assert request.retention == Retention.NORMAL


@pytest.mark.parametrize("ask", ["complete", "chat"])
def test_a_salt_is_hashed(service: Service, ask: str) -> None:
    for text in ("x", "é 世界", "x" * 4096):
        request = sent(service, ask, cache_salt=text)
        assert request.salt == blake2b(text.encode(), digest_size=16).digest()


def test_every_prompt_of_a_request_has_its_salt(service: Service) -> None:
    sent(service, prompt=["Hello", "world"], cache_salt="x")
    assert len({request.salt for request in service.core.requests}) == 1 and len(service.core.requests) == 2
    assert service.core.requests[0].salt


@pytest.mark.parametrize(
    ("name", "retention"),
    [
        ("in_memory", Retention.NORMAL),
        ("in-memory", Retention.NORMAL),
        ("24h", Retention.KEEP),
        ("none", Retention.DROP),
        (None, Retention.NORMAL),
    ],
)
def test_retention(service: Service, name: str | None, retention: Retention) -> None:
    for ask in ("complete", "chat"):
        assert sent(service, ask, prompt_cache_retention=name).retention == retention


def test_a_wrong_retention_is_told_the_right_ones(service: Service) -> None:
    error = error_of(service.chat(prompt_cache_retention="48h"), 400)
    assert error["param"] == "prompt_cache_retention"
    assert all(name in error["message"] for name in ("in_memory", "24h", "none", "'48h'"))


def test_deadlines(service: Service) -> None:
    assert sent(service, deadline_ms=1).deadline_ms == 1
    assert sent(service, "chat", deadline_ms=2**31 - 1).deadline_ms == 2**31 - 1


@pytest.mark.parametrize(("text", "most_ms"), [("2", 2000), ("0.5", 500), ("1e6", 10**9)])
def test_the_time_limit_runs_from_the_arrival(service: Service, text: str, most_ms: int) -> None:
    assert with_headers(service, {"X-Request-Timeout": text}).status_code == 200
    assert most_ms - 400 < service.core.requests[-1].timeout_ms <= most_ms


def test_without_the_header_the_core_decides(service: Service) -> None:
    assert sent(service).timeout_ms == 0


@pytest.mark.parametrize("text", ["", "0", "-1", "nan", "inf", "1000001", "soon", "1,2", "1_0", "1e999"])
def test_a_wrong_time_limit_is_refused(service: Service, text: str) -> None:
    assert error_of(with_headers(service, {"X-Request-Timeout": text}), 400)["param"] == "X-Request-Timeout"
    assert not service.core.requests


def test_two_time_limits_are_refused(service: Service) -> None:
    headers = [("X-Request-Timeout", "5"), ("X-Request-Timeout", "5")]
    assert error_of(with_headers(service, headers), 400)["param"] == "X-Request-Timeout"


def test_a_time_that_is_over_before_the_core_hears_of_it(service: Service) -> None:
    error = error_of(with_headers(service, {"X-Request-Timeout": "1e-9"}), 504)
    assert (error["code"], error["type"]) == ("request_timeout", "timeout_error")
    assert not service.core.requests


def test_a_time_that_is_over_in_the_core(service: Service) -> None:
    service.core.script = lambda _request, _i: Answer([5, 6], EndReason.TIMEOUT, message="not done within 2 s")
    error = error_of(with_headers(service, {"X-Request-Timeout": "2"}), 504)
    assert (error["code"], error["message"]) == ("request_timeout", "not done within 2 s")


def test_a_cache_key_is_only_a_hint(service: Service) -> None:
    keyed, plain = sent(service, prompt_cache_key="key"), sent(service)
    assert (keyed.salt, keyed.tenant) == (plain.salt, plain.tenant) == (b"", "")


def test_the_header_names_the_tenant_before_the_body(service: Service) -> None:
    """A gateway knows who pays; `user` is who its tenant serves."""
    for body, headers, tenant in (
        ({}, {}, ""),
        ({"user": "someone"}, {}, "someone"),
        ({}, {"X-Tenant": "acme"}, "acme"),
        ({"user": "someone"}, {"x-tenant": "acme"}, "acme"),
        ({"user": "someone"}, {"X-Tenant": "a" * 256}, "a" * 256),
    ):
        assert with_headers(service, headers, **body).status_code == 200
        assert service.core.requests[-1].tenant == tenant


@pytest.mark.parametrize(
    "headers",
    [
        [("X-Tenant", "")],
        [("X-Tenant", "two words")],
        [("X-Tenant", "x" * 257)],
        [("X-Tenant", b"\xe9")],
        [("X-Tenant", "a"), ("X-Tenant", "a")],
    ],
    ids=["empty", "space", "long", "not ascii", "twice"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_tenant_header_is_refused(service: Service, headers: Any, stream: bool) -> None:
    error = error_of(with_headers(service, headers, stream=stream), 400)
    assert error["param"] == "X-Tenant" and "X-Tenant" in error["message"]
    assert not service.core.requests
