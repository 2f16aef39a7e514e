"""Asks every request for its API key, before its body is read."""

from __future__ import annotations

import structlog
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from scheduler_svc.frontend.key_ring import KeyRing
from scheduler_svc.http.errors import ApiError
from scheduler_svc.keys import ANYBODY, ApiKey

OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready"})
"""Load balancers and supervisors ask here, and learn nothing else."""
METRICS_PATH = "/metrics"
CHALLENGE = 'Bearer realm="gilir"'


def open_paths(open_metrics: bool) -> frozenset[str]:
    """Paths that ask for no key."""
    return OPEN_PATHS | {METRICS_PATH} if open_metrics else OPEN_PATHS


class KeyCheck:
    """Lets through who has a key, and notes whose it is in the request's scope. RFC 6750 tells the header."""

    def __init__(self, app: ASGIApp, ring: KeyRing, *, open_metrics: bool) -> None:
        self._app, self._ring = app, ring
        self._open = open_paths(open_metrics)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._ring.asked_for and scope["path"] not in self._open:
            try:
                key = self._authenticate(scope)
            except ApiError as error:
                scope["gilir.log"] = {"code": error.code}
                await error.response()(scope, receive, send)
                return
            scope["gilir.key"] = key
            structlog.contextvars.bind_contextvars(api_key_id=key.id)
        await self._app(scope, receive, send)

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
