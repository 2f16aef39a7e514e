"""API keys at the REST API: who is let in, as whom, and what the key allows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
from fake_core import Answer
from frontend_service import BYTE_FALLBACK, BYTE_LEVEL, Service, error_of, run_service, wait_until

from common.wire import EndReason, KeyLimits
from scheduler_svc.frontend.app import RequestFrame
from scheduler_svc.frontend.key_ring import CHECK_S
from scheduler_svc.keys import ApiKey, add_key, fingerprint_of, new_secret

ACME, LIMITED, NARROW = (new_secret() for _ in range(3))
ROUTES = [
    ("GET", "/v1/models"),
    ("GET", f"/v1/models/{BYTE_LEVEL}"),
    ("GET", "/v1/requests/abc"),
    ("GET", "/v1/requests/abc/stream"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/tokenizer_info"),
    ("GET", "/version"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
    ("GET", "/no/such/path"),
    ("GET", "/health/"),
    ("DELETE", "/v1/completions"),
]


def key(secret: str, name: str, tenant: str = "acme", **fields: Any) -> ApiKey:
    return ApiKey(id=name, tenant=tenant, sha256=fingerprint_of(secret).hex(), **fields)


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.jsonl"
    add_key(path, key(ACME, "first"))
    add_key(path, key(LIMITED, "limited", "other", max_concurrent=3, tokens_per_minute=500, best_priority=-2))
    add_key(path, key(NARROW, "narrow", "narrow", models=(BYTE_FALLBACK,)))
    return path


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, key_file: Path) -> Iterator[Service]:
    with run_service(tmp_path_factory.mktemp("ipc"), "--api-keys", str(key_file), key=ACME) as service:
        yield service


@pytest.fixture
def closed(running: Service) -> Service:
    running.core.reset()
    wait_until(lambda: running.get("/health").status_code == 200)
    return running


def bearer(secret: str, **more: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}", **more}


def ask(service: Service, secret: str, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    """A completion under a key."""
    content = {"model": BYTE_LEVEL, "prompt": "Hello", **body}
    return service.client.post("/v1/completions", json=content, headers=bearer(secret, **(headers or {})))


# --- the door ---


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_path_but_health_asks_for_a_key(closed: Service, method: str, path: str) -> None:
    answer = httpx.request(method, closed.url + path, content=b"no JSON")
    error = error_of(answer, 401)
    assert (error["code"], error["type"]) == ("invalid_api_key", "invalid_request_error")
    assert answer.headers["www-authenticate"] == 'Bearer realm="gilir"' and answer.headers["x-request-id"]
    assert not closed.core.requests


def test_health_is_open(closed: Service) -> None:
    for path in ("/health", "/health/live", "/health/ready"):
        assert httpx.get(closed.url + path).status_code == 200


def test_a_key_opens_the_rest(closed: Service) -> None:
    for path in ("/v1/models", "/metrics", "/version", f"/tokenizer_info?model={BYTE_LEVEL}"):
        assert closed.get(path).status_code == 200
    assert closed.post("/tokenize", model=BYTE_LEVEL, prompt="Hello").json()["count"] > 0
    assert closed.complete().status_code == closed.chat().status_code == 200
    assert closed.complete(stream=True).text.endswith("data: [DONE]\n\n")
    error_of(closed.get("/no/such/path"), 404)


@pytest.mark.parametrize(
    "headers",
    [
        [("authorization", f"Bearer {ACME}x")],
        [("authorization", f"Bearer {ACME[:-1]}")],
        [("authorization", f"Bearer {fingerprint_of(ACME).hex()}")],
        [("authorization", "Bearer " + "x" * 20_000)],
        [("authorization", b"Bearer \xe9\xff")],
        [("authorization", "Bearer")],
        [("authorization", "")],
        [("authorization", ACME)],
        [("authorization", f"Basic {ACME}")],
        [("authorization", f"Bearer {ACME}"), ("authorization", f"Bearer {ACME}")],
    ],
    ids=["longer", "shorter", "hash", "huge", "bytes", "scheme", "empty", "bare", "basic", "twice"],
)
def test_what_is_no_key_is_refused(closed: Service, headers: Any) -> None:
    answer = httpx.get(closed.url + "/v1/models", headers=headers)
    assert error_of(answer, 401)["code"] == "invalid_api_key"
    assert 'error="invalid_token"' in answer.headers["www-authenticate"]


def test_the_scheme_may_be_written_in_any_case(closed: Service) -> None:
    assert httpx.get(closed.url + "/v1/models", headers={"authorization": f"bearer  {ACME}"}).status_code == 200


# --- whose key it is ---


def test_the_tenant_is_the_keys(closed: Service) -> None:
    for headers, user in ({}, None), ({}, "someone"), ({"x-tenant": "acme"}, "someone"):
        assert ask(closed, ACME, headers, user=user).status_code == 200
        assert closed.core.requests[-1].tenant == "acme"
    error = error_of(ask(closed, ACME, {"x-tenant": "other"}), 400)
    assert error["param"] == "X-Tenant" and "other" not in error["message"]
    assert len(closed.core.requests) == 3


def test_limits_go_to_the_core_with_every_part_of_a_call(closed: Service) -> None:
    ask(closed, ACME)
    assert closed.core.requests[-1].limits == KeyLimits()
    ask(closed, LIMITED, prompt=["a", "b", "c"], n=2)
    ask(closed, LIMITED)
    sent = [request.limits for request in closed.core.requests[1:]]
    assert {(one.key, one.max_concurrent, one.tokens_per_minute) for one in sent} == {("limited", 3, 500)}
    assert [one.call for one in sent[:3]] == [closed.core.requests[1].first_stream] * 3
    assert sent[3].call == closed.core.requests[4].first_stream != sent[0].call


def test_no_request_is_more_urgent_than_its_key_allows(closed: Service) -> None:
    for secret, asked, given in (
        (ACME, None, 0), (ACME, -1, 0), (ACME, 3, 3), (LIMITED, -9, -2), (LIMITED, -1, -1), (LIMITED, None, 0)
    ):  # fmt: skip
        assert ask(closed, secret, priority=asked).status_code == 200
        assert closed.core.requests[-1].priority == given


def test_a_key_sees_the_models_that_it_may_use(closed: Service) -> None:
    headers = bearer(NARROW)
    listed = closed.client.get("/v1/models", headers=headers).json()["data"]
    assert [model["id"] for model in listed] == [BYTE_FALLBACK]
    refused = [
        ask(closed, NARROW),
        closed.client.get(f"/v1/models/{BYTE_LEVEL}", headers=headers),
        closed.client.get(f"/tokenizer_info?model={BYTE_LEVEL}", headers=headers),
        closed.client.post("/tokenize", json={"model": BYTE_LEVEL, "prompt": "x"}, headers=headers),
        closed.client.post("/detokenize", json={"model": BYTE_LEVEL, "tokens": [1]}, headers=headers),
        closed.client.post("/v1/chat/completions", json={"model": BYTE_LEVEL, "messages": []}, headers=headers),
    ]
    unknown = ask(closed, NARROW, model="no such model")
    for answer in refused:
        error = error_of(answer, 404)
        assert error["message"].replace(BYTE_LEVEL, "no such model") == error_of(unknown, 404)["message"]
    assert ask(closed, NARROW, model=None).json()["model"] == BYTE_FALLBACK
    assert {request.model for request in closed.core.requests} == {BYTE_FALLBACK}


def test_an_inquiry_is_for_the_keys_tenant(closed: Service) -> None:
    error_of(closed.get("/v1/requests/abc"), 404)
    assert {inquiry.tenant for inquiry in closed.core.inquiries} == {"acme"}


def test_over_a_limit_is_429_with_the_time_to_wait(closed: Service) -> None:
    text = "this API key may use 500 tokens a minute"
    closed.core.answer(Answer(reason=EndReason.OVER_LIMIT, message=text, retry_after_s=17))
    for stream in (False, True):
        answer = ask(closed, LIMITED, stream=stream)
        error = error_of(answer, 429)
        assert (error["code"], error["type"], error["message"]) == ("rate_limit_exceeded", "rate_limit_error", text)
        assert answer.headers["retry-after"] == "17"


# --- a file that changes ---


def test_keys_come_and_go_while_the_service_runs(closed: Service, key_file: Path) -> None:
    new, before = new_secret(), key_file.read_text()
    assert ask(closed, new).status_code == 401
    add_key(key_file, key(new, "new"))
    wait_until(lambda: ask(closed, new).status_code == 200)
    key_file.write_text("{broken\n")
    time.sleep(CHECK_S + 0.1)
    assert ask(closed, new).status_code == 200, "the last good keys stay"
    key_file.write_text(before)
    wait_until(lambda: ask(closed, new).status_code == 401)
    assert ask(closed, ACME).status_code == 200


# --- one key for all ---


def test_one_key_for_all_names_tenants_as_it_likes(tmp_path: Path) -> None:
    secret = "token-abc123"
    with run_service(tmp_path, "--open-metrics", key=secret, environment={"GILIR_API_KEY": secret}) as service:
        assert httpx.get(service.url + "/metrics").status_code == 200
        assert httpx.get(service.url + "/v1/models").status_code == 401
        assert ask(service, secret + "x").status_code == 401
        assert ask(service, secret, {"x-tenant": "a"}, user="b", priority=-9).status_code == 200
        request = service.core.requests[-1]
        assert (request.tenant, request.priority, request.limits) == ("a", -9, KeyLimits())
        assert ask(service, secret, user="b").status_code == 200
        assert service.core.requests[-1].tenant == "b"


def test_a_pipelined_request_is_not_logged_under_the_key_of_the_one_before_it() -> None:
    seen = []

    async def application(_scope: Any, _receive: Any, _send: Any) -> None:
        seen.append(structlog.contextvars.get_contextvars())
        structlog.contextvars.bind_contextvars(api_key_id="first")

    async def two_in_one_context() -> None:
        for _ in range(2):
            await RequestFrame(application)({"type": "http", "method": "GET", "headers": []}, None, None)  # type: ignore[arg-type]

    asyncio.run(two_in_one_context())
    assert [list(names) for names in seen] == [["request_id"], ["request_id"]]
