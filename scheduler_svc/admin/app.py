"""The FastAPI application of the admin process. Errors have OpenAI's shape, as on the public port."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog
from fastapi import Depends, FastAPI
from starlette.requests import Request
from starlette.responses import Response

from scheduler_svc.admin import routes
from scheduler_svc.admin.key import AdminKey
from scheduler_svc.admin.link import AdminLink
from scheduler_svc.http.error_answers import answer_errors
from scheduler_svc.http.errors import ApiError, internal
from scheduler_svc.http.local_callers import check_local

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
    """Raise `ApiError` 401 without the key. Where there is none, 403 for what a browser may have been made to send."""
    key: AdminKey | None = request.app.state.key
    if key is not None:
        if not key.opens(request.headers.get("authorization", "")):
            headers = {"www-authenticate": "Bearer"}
            raise ApiError(401, "the admin key is missing or wrong", code="invalid_api_key", headers=headers)
    else:
        text = "without an admin key only programs on this machine are served, by its loopback address"
        check_local(request.scope["headers"], text, own_pages=False)


async def _answer_fault(_request: Request, error: Exception) -> Response:
    log.error("admin request failed", error=repr(error))
    return internal().response()
