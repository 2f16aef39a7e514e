"""Errors that routes raise become answers in OpenAI's shape."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from scheduler_svc.http.errors import ApiError, ClientGone, from_http_exception

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for it; nobody receives it, it is for the log."""


def answer_errors(app: FastAPI) -> None:
    """Answer `ApiError`, `ClientGone` and Starlette's own errors. What is wrong is left in `gilir.log` of the scope."""
    app.add_exception_handler(ApiError, _answer_api_error)
    app.add_exception_handler(ClientGone, _answer_client_gone)
    app.add_exception_handler(HTTPException, _answer_http_exception)


async def _answer_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    request.scope["gilir.log"] = {"param": error.param, "code": error.code}
    return error.response()


async def _answer_client_gone(_request: Request, _error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return from_http_exception(request.method, request.url.path, error).response()
