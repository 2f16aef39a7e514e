"""Errors in OpenAI's shape, and how the core's endings become HTTP answers."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.responses import Response

from common.wire import Ended, EndReason

LONGEST_PATH = 100
"""Characters of a path that an error repeats."""


class ApiError(Exception):
    """An error that the client is told of: HTTP status, message, type, the parameter at fault, a code."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.param, self.code = status, message, kind, param, code
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return Response(orjson.dumps(self.body), self.status, self.headers, "application/json")


class ClientGone(Exception):
    """The client closed the connection; there is nobody to answer."""


def invalid(param: str | None, message: str, code: str | None = None) -> ApiError:
    """400: the client's mistake, in the named parameter."""
    return ApiError(400, message, param=param, code=code)


def from_http_exception(method: str, path: str, error: HTTPException) -> ApiError:
    """Starlette's own errors: unknown paths and methods."""
    text = {404: f"there is nothing at {path[:LONGEST_PATH]}", 405: f"{method} is not allowed at {path[:LONGEST_PATH]}"}
    message = text.get(error.status_code, str(error.detail))
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    return ApiError(error.status_code, message, code=code, headers=dict(error.headers or {}))


def unavailable(message: str, code: str = "service_unavailable", retry_after_s: int | None = None) -> ApiError:
    """503: nothing is wrong with the request, but it cannot be served now."""
    headers = {} if retry_after_s is None else {"retry-after": str(retry_after_s)}
    return ApiError(503, message, kind="service_unavailable", code=code, headers=headers)


def internal(message: str = "The server had an error while processing the request.") -> ApiError:
    return ApiError(500, message, kind="server_error", code="internal_error")


def timed_out(message: str, headers: dict[str, str] | None = None) -> ApiError:
    """504: the request was not done within its `X-Request-Timeout`, or the service's own limit."""
    return ApiError(504, message, kind="timeout_error", code="request_timeout", headers=headers)


def from_ending(ended: Ended) -> ApiError:
    """The error that an abnormal ending stands for."""
    text = ended.message
    match EndReason(ended.reason):
        case EndReason.REJECTED:
            return invalid(None, text or "the request cannot be served", "rejected")
        case EndReason.QUEUE_FULL:
            wait = max(1, ended.retry_after_s)
            message = text or "the queue is full"
            headers = {"retry-after": str(wait)}
            return ApiError(429, message, kind="rate_limit_error", code="queue_full", headers=headers)
        case EndReason.OVER_LIMIT:
            wait = max(1, ended.retry_after_s)
            headers = {"retry-after": str(wait)}
            return ApiError(429, text, kind="rate_limit_error", code="rate_limit_exceeded", headers=headers)
        case EndReason.NO_EXECUTOR:
            return unavailable(text or "no executor serves the model", "no_executor", ended.retry_after_s or None)
        case EndReason.SHUTDOWN:
            return unavailable(text or "the service is stopping", "shutting_down")
        case EndReason.TIMEOUT:
            return timed_out(text or "the request took longer than it may")
        case EndReason.ABORTED:
            return unavailable(text or "the request was aborted", "aborted")
        case _:
            return ApiError(500, text or "the request failed", kind="server_error", code="failed")
