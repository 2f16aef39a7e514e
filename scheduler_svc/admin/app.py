"""The FastAPI application of the admin process. Errors have OpenAI's shape, as on the public port."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog
from fastapi import Depends, FastAPI
from starlette.requests import Request
from starlette.responses import Response

from common.addresses import is_loopback
from scheduler_svc.admin import routes
from scheduler_svc.admin.key import AdminKey
from scheduler_svc.admin.link import AdminLink
from scheduler_svc.http.error_answers import answer_errors
from scheduler_svc.http.errors import ApiError, internal

log = structlog.get_logger()


def create_app(core_address: str, key: AdminKey | None) -> FastAPI:
    """The application; its lifespan opens and closes the link to the core. Without a key it is open to its host."""
    link = AdminLink(core_address)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        link.open()
        try:
            yield
        finally:
            await link.close()

    app = FastAPI(
        title="Gilir admin",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        dependencies=[Depends(check_caller)],
    )
    app.state.link, app.state.key = link, key
    app.include_router(routes.router)
    answer_errors(app)
    app.add_exception_handler(Exception, _answer_fault)
    return app


async def check_caller(request: Request) -> None:
    """Raise `ApiError` 401 without the key. Where there is none, 403 for what a browser was made to send: pages from
    elsewhere can reach this machine's ports through it, but not without an `Origin` or a foreign `Host`."""
    key: AdminKey | None = request.app.state.key
    if key is not None:
        if not key.opens(request.headers.get("authorization", "")):
            headers = {"www-authenticate": "Bearer"}
            raise ApiError(401, "the admin key is missing or wrong", code="invalid_api_key", headers=headers)
    elif "origin" in request.headers or not is_loopback(_host_name(request.headers.get("host", ""))):
        text = "without an admin key only programs on this machine are served, by its loopback address"
        raise ApiError(403, text, code="forbidden")


def _host_name(header: str) -> str:
    """The host in a `Host` header, without its port."""
    return header[1:].partition("]")[0] if header.startswith("[") else header.partition(":")[0]


async def _answer_fault(_request: Request, error: Exception) -> Response:
    log.error("admin request failed", error=repr(error))
    return internal().response()
