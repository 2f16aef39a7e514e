"""Without API keys, programs on this machine are served, and not the web pages that its browsers show."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient
from frontend_service import BYTE_LEVEL, Service, error_of

from scheduler_svc.frontend.app import create_app
from scheduler_svc.frontend.settings import FrontendSettings
from scheduler_svc.http.errors import ApiError
from scheduler_svc.http.local_callers import check_local

EVIL = "http://evil.example"


def passes(*headers: tuple[str, str], own_pages: bool = True) -> bool:
    try:
        check_local([(name.encode(), value.encode("latin-1")) for name, value in headers], "text", own_pages=own_pages)
    except ApiError as error:
        assert (error.status, error.code, error.message) == (403, "forbidden", "text")
        return False
    return True


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1:8000", "127.8.9.1", "[::1]:8000", "[::1]"])
def test_programs_on_this_machine_may_ask(host: str) -> None:
    assert passes(("host", host)) and passes(("host", host), own_pages=False)
    assert passes(("host", host), ("origin", f"http://{host}")), "a page that this very port serves"
    assert not passes(("host", host), ("origin", f"http://{host}"), own_pages=False)


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("host", "evil.example:8000")],
        [("host", "localhost.evil.example")],
        [("host", "127.0.0.1.evil.example")],
        [("host", "evil.example@localhost")],
        [("host", "0.0.0.0:8000")],
        [("host", "[::1")],
        [("host", "")],
        [("host", "\xe9")],
        [("host", "localhost"), ("host", "evil.example")],
        [("host", "localhost:8000"), ("origin", EVIL)],
        [("host", "localhost:8000"), ("origin", "null")],
        [("host", "localhost:8000"), ("origin", "")],
        [("host", "localhost:8000"), ("origin", "http://localhost:3000")],
        [("host", "localhost:8000"), ("origin", "http://localhost")],
        [("host", "localhost:8000"), ("origin", "http://127.0.0.1:8000")],
        [("host", "localhost:8000"), ("origin", "ftp://localhost:8000")],
        [("host", "localhost:8000"), ("origin", "http://localhost:8000"), ("origin", EVIL)],
        [("host", "evil.example"), ("origin", EVIL)],
    ],
    ids=repr,
)
def test_pages_from_elsewhere_may_not(headers: list[tuple[str, str]]) -> None:
    assert not passes(*headers)


def test_the_service_refuses_them_before_it_reads_a_body(service: Service) -> None:
    body = json.dumps({"model": BYTE_LEVEL, "prompt": "Hello"}).encode()
    sent: list[dict[str, str]] = [{"origin": EVIL, "content-type": "text/plain"}, {"origin": "null"}, {"host": "evil"}]
    for headers in sent:
        for method, path in (
            ("POST", "/v1/completions"),
            ("GET", "/v1/files/file-1/content"),
            ("OPTIONS", "/tokenize"),
        ):
            answer = service.client.request(method, path, content=body, headers=headers)
            error = error_of(answer, 403)
            assert error["code"] == "forbidden" and "--allow-no-api-keys" in error["message"]
            assert answer.headers["x-request-id"] and "access-control-allow-origin" not in answer.headers
    assert not service.core.requests
    assert service.raw("/v1/completions", body, origin=service.url).status_code == 200


def test_what_is_open_without_a_key_stays_open(service: Service) -> None:
    for path, status in (("/health", 200), ("/health/live", 200), ("/health/ready", 200), ("/metrics", 403)):
        assert service.client.get(path, headers={"host": "10.0.0.7:8000"}).status_code == status


@pytest.mark.parametrize(
    ("settings", "path", "status"),
    [
        ({}, "/version", 403),
        ({"allow_no_api_keys": True}, "/version", 200),
        ({"open_metrics": True}, "/metrics", 200),
        ({"api_key": "secret"}, "/version", 401),
        ({"api_key": "secret", "allow_no_api_keys": True}, "/version", 401),
    ],
    ids=repr,
)
def test_who_is_asked_for_what(settings: dict[str, Any], path: str, status: int) -> None:
    client = TestClient(create_app(FrontendSettings(core="ipc://nowhere", **settings)), base_url="http://elsewhere")
    assert client.get(path, headers={"origin": EVIL}).status_code == status
