"""The FastAPI application of a frontend: routes, error answers, and the frame around every request."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog
from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from scheduler_svc.batches.store_thread import StoreThread, open_thread
from scheduler_svc.frontend import absent, accounts, chat, completions, health, tokenization
from scheduler_svc.frontend.auth import KeyCheck
from scheduler_svc.frontend.batching import files, routes
from scheduler_svc.frontend.dashboard import routes as dashboard
from scheduler_svc.frontend.frontend import Frontend
from scheduler_svc.frontend.openapi import route as openapi
from scheduler_svc.frontend.responses import routes as responses
from scheduler_svc.frontend.resuming import routes as resuming
from scheduler_svc.frontend.serving import REQUEST_ID
from scheduler_svc.frontend.settings import FrontendSettings
from scheduler_svc.frontend.tracing.provider import close_provider, open_provider
from scheduler_svc.http.error_answers import answer_errors
from scheduler_svc.http.errors import internal, unavailable

log = structlog.get_logger()

QUIET_ROUTES = (
    *("/health", "/health/live", "/health/ready", "/metrics", "/load", "/version", accounts.ROUTE),
    *dashboard.QUIET_ROUTES,
)
"""Asked many times a minute; logged at debug level."""


def create_app(settings: FrontendSettings) -> FastAPI:
    """The application; its lifespan opens and closes the link to the core."""
    frontend = Frontend(settings)
    traces = open_provider()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        frontend.open()
        await frontend.peers.open()
        batches: StoreThread | None = open_thread(settings.batch_dir, settings.batch_database)
        app.state.batches = batches
        try:
            await frontend.settle()
            yield
        finally:
            frontend.peers.close()
            frontend.close()
            if batches is not None:
                batches.close()
            if traces is not None:
                await close_provider(traces)

    app = FastAPI(
        title="Gilir",
        version=health.VERSION,
        lifespan=lifespan,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.frontend = frontend
    for module in (
        completions,
        chat,
        responses,
        tokenization,
        resuming,
        accounts,
        files,
        routes,
        health,
        openapi,
        absent,
        dashboard,
    ):
        app.include_router(module.router)
    answer_errors(app)
    if traces is not None:
        from scheduler_svc.frontend.tracing.middleware import TraceRequests

        app.add_middleware(TraceRequests, provider=traces)
    app.add_middleware(
        KeyCheck,
        ring=frontend.keys,
        open_metrics=settings.open_metrics,
        allow_no_keys=settings.allow_no_api_keys,
    )
    app.add_middleware(RequestFrame)  # the outermost: it logs what the other refuses, too
    return app


class RequestFrame:
    """Around every request: its id, one log line at its end, and 500 in the API's own shape if all else fails."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["gilir.request_id"] = _incoming_id(scope) or uuid.uuid4().hex
        started, status = time.perf_counter(), 0
        # A pipelined request begins in the context of the one before it, whose key is not its own.
        structlog.contextvars.clear_contextvars()
        structlog.contextvars.bind_contextvars(request_id=scope["gilir.request_id"])

        async def send_framed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                request_id = scope["gilir.request_id"].encode()
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        try:
            await self._app(scope, receive, send_framed)
        except Exception:
            log.exception("request failed")
            if status:
                raise
            await internal().response()(scope, receive, send_framed)
        except asyncio.CancelledError:
            # Only the server's end does that, to what has not ended before: bodies that still come, downloads.
            if status:
                scope["gilir.cut_off"]()
            else:
                error = unavailable("the service is stopping", "shutting_down")
                await error.response()(scope, receive, send_framed)
        finally:
            _log_request(scope, status, time.perf_counter() - started)


def _incoming_id(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            text = value.decode("latin-1")
            return text if REQUEST_ID.fullmatch(text) else None
    return None


def _log_request(scope: Scope, status: int, seconds: float) -> None:
    route = getattr(scope.get("route"), "path", "other")
    write = log.debug if route in QUIET_ROUTES else log.info
    write(
        "request",
        request_id=scope["gilir.request_id"],
        method=scope["method"],
        route=route,
        status=status,
        ms=round(seconds * 1000, 1),
        **scope.get("gilir.log", {}),
    )
