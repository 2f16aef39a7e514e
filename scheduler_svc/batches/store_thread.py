"""The store from an event loop: one thread, one connection, so that a slow disk holds up no other request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from scheduler_svc.batches.database import Database, open_database
from scheduler_svc.batches.store import Store

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
