"""Asks every request for its API key, or where it comes from if there are no keys, before its body is read."""

from __future__ import annotations

import re

import structlog
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from scheduler_svc.frontend.key_ring import KeyRing
from scheduler_svc.http.errors import ApiError
from scheduler_svc.http.local_callers import check_local
from scheduler_svc.keys import ANYBODY, ApiKey

OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready"})
"""Load balancers and supervisors ask here, and learn nothing else."""
PAGE = re.compile(r"/dashboard(/[a-z_]+\.(css|js|svg))?")
"""The live page and its files, which hold nothing of the service; what they show asks for a key."""
METRICS_PATH = "/metrics"
CHALLENGE = 'Bearer realm="gilir"'
ONLY_LOCAL = (
    "No API keys are set, so only programs on this machine are served, and no web page of another origin: ask at "
    "localhost, 127.0.0.1 or [::1], or start the service with --api-keys, --api-key or --allow-no-api-keys."
)


def open_paths(open_metrics: bool) -> frozenset[str]:
    """Paths that ask for no key."""
    return OPEN_PATHS | {METRICS_PATH} if open_metrics else OPEN_PATHS


class KeyCheck:
    """Lets through who has a key, and notes whose it is in the request's scope. RFC 6750 tells the header.

    Where no key is asked for, it lets through whoever is on this machine.
    """

    def __init__(self, app: ASGIApp, ring: KeyRing, *, open_metrics: bool, allow_no_keys: bool) -> None:
        """`allow_no_keys`: without keys, let everybody through."""
        self._app, self._ring = app, ring
        self._open = open_paths(open_metrics)
        self._open_to_all = allow_no_keys and not ring.asked_for

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._open_to_all and not self._is_open(scope["path"]):
            try:
                self._check(scope)
            except ApiError as error:
                scope["gilir.log"] = {"code": error.code}
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _is_open(self, path: str) -> bool:
        return path in self._open or PAGE.fullmatch(path) is not None

    def _check(self, scope: Scope) -> None:
        """Raise `ApiError` 401 or 403 for who may not ask."""
        if not self._ring.asked_for:
            check_local(scope["headers"], ONLY_LOCAL, own_pages=True)
            return
        key = self._authenticate(scope)
        scope["gilir.key"] = key
        structlog.contextvars.bind_contextvars(api_key_id=key.id)

    def _authenticate(self, scope: Scope) -> ApiKey:
        """Whose key the request has. Raises `ApiError` 401 when it has none, or none that is known."""
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if not given:
            text = "No API key was given: send it in the header `Authorization: Bearer KEY`."
            raise _unauthorized(text, CHALLENGE)
        scheme, _, secret = given[0].decode("latin-1").partition(" ")
        key = self._ring.find(secret.strip()) if len(given) == 1 and scheme.lower() == "bearer" else None
        if key is None:
            raise _unauthorized("The API key is not valid.", f'{CHALLENGE}, error="invalid_token"')
        return key


def key_of(request: Request) -> ApiKey:
    """The key that a request was let in with; `ANYBODY` where none is asked for."""
    key: ApiKey = request.scope.get("gilir.key", ANYBODY)
    return key


def _unauthorized(message: str, challenge: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": challenge})
