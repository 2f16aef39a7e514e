"""What the routes of files and batches share: whose they are, the store, and its errors as the API tells them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

import structlog
from starlette.requests import Request

from scheduler_svc.batches.database import StorageError
from scheduler_svc.batches.store import Store
from scheduler_svc.batches.store_thread import StoreThread
from scheduler_svc.frontend.auth import key_of
from scheduler_svc.frontend.frontend import frontend_of
from scheduler_svc.frontend.scheduling import tenant_of as request_tenant
from scheduler_svc.http.errors import ApiError, unavailable
from scheduler_svc.http.patience import patience
from scheduler_svc.metrics import metric_key

log = structlog.get_logger()

METRICS_S = 1.0

P = ParamSpec("P")
T = TypeVar("T")


def tenant_of(request: Request) -> str:
    """Whose files and batches a request is about: it sees no others."""
    return request_tenant(request, key_of(request)) or ""


async def ask(request: Request, work: Callable[Concatenate[Store, P], T], *arguments: P.args, **named: P.kwargs) -> T:
    """Run a method of the store for a request. Raises `ApiError`: 404 where batches are off, 503 without a database."""
    thread: StoreThread | None = request.app.state.batches
    if thread is None:
        raise ApiError(404, "Batches are off: the service was started without --batch-dir.", code="batches_off")
    try:
        return await thread.run(work, *arguments, **named)
    except StorageError as error:
        log.error("the batches' database cannot be used", error=str(error))
        raise unavailable("the storage of files and batches cannot be used now", "storage_unavailable") from None


async def line_gauges(request: Request) -> dict[str, float]:
    """Lines by state, for `/metrics`; nothing where batches are off or the database does not answer at once."""
    thread: StoreThread | None = request.app.state.batches
    if thread is None:
        return {}
    try:
        async with patience(METRICS_S):
            counts = await thread.run(Store.count_lines)
    except (StorageError, TimeoutError) as error:
        log.debug("metrics of batches left out", reason=str(error))
        return {}
    return {metric_key("gilir_batch_lines", state=state): count for state, count in counts.items()}


def admit_change(request: Request) -> None:
    """Raise `ApiError` 503 when the service is stopping."""
    if frontend_of(request).stopping:
        raise unavailable("the service is stopping", "shutting_down")
