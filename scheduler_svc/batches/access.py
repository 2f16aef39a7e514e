"""The store from an event loop: one thread, one connection, so that a slow disk holds up no other request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import structlog
from starlette.requests import Request

from scheduler_svc.batches.database import Database, StorageError, open_database
from scheduler_svc.batches.store import Store
from scheduler_svc.frontend.auth import key_of
from scheduler_svc.frontend.frontend import frontend_of
from scheduler_svc.frontend.scheduling import tenant_of as request_tenant
from scheduler_svc.http.errors import ApiError, unavailable
from scheduler_svc.metrics import metric_key

log = structlog.get_logger()

METRICS_S = 1.0

P = ParamSpec("P")
T = TypeVar("T")


class StoreThread:
    """Runs the store's methods one after another, in the order in which they are asked for."""

    def __init__(self, database: Database) -> None:
        self._store = Store(database)
        self._pool = ThreadPoolExecutor(1, "batches")

    async def run(self, work: Callable[Concatenate[Store, P], T], *arguments: P.args, **named: P.kwargs) -> T:
        """What `work(store, …)` returns. Raises `StorageError`. Once begun it ends, even if nobody waits any more."""
        return await asyncio.get_running_loop().run_in_executor(
            self._pool, lambda: work(self._store, *arguments, **named)
        )

    def close(self) -> None:
        """Wait for what is under way, drop what has not begun, and close the connection."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._store.close()


def open_thread(folder: Path | None, url: str | None) -> StoreThread | None:
    """None where batches are off. Raises ValueError as `open_database` does."""
    return None if folder is None and url is None else StoreThread(open_database(folder, url))


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
        counts = await asyncio.wait_for(thread.run(Store.count_lines), METRICS_S)
    except (StorageError, TimeoutError) as error:
        log.debug("metrics of batches left out", reason=str(error))
        return {}
    return {metric_key("gilir_batch_lines", state=state): count for state, count in counts.items()}


def admit_change(request: Request) -> None:
    """Raise `ApiError` 503 when the service is stopping."""
    if frontend_of(request).stopping:
        raise unavailable("the service is stopping", "shutting_down")
