"""Threads for long texts, shared out so that nobody's texts keep everybody else's waiting."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


class TextThreads:
    """Some threads for the texts of all tenants in turn, and one more for those that will hardly be accepted.

    Whether a text fits a context is known when all of it has been tokenized. The tokens of its beginning tell nothing
    for certain: a tokenizer may join, drop or replace text of any length (normalizers, added tokens that strip what is
    beside them, words that become one unknown token, segmentations of the best total score). So what is much longer
    than ordinary text of so many tokens is not refused sooner: it waits for a thread of its own, and takes no other.
    """

    def __init__(self, threads: int) -> None:
        self._usual, self._doubtful = _Turns(threads, "tokenizer"), _Turns(1, "tokenizer-doubtful")

    def submit(self, tenant: str, work: Callable[[], T], *, doubtful: bool) -> asyncio.Future[T]:
        """Have a thread do it. Called in an event loop; what is cancelled before its turn is never begun."""
        return (self._doubtful if doubtful else self._usual).submit(tenant, work)

    def shutdown(self) -> None:
        """Cancel what waits, begin nothing more, and wait for nothing."""
        self._usual.shutdown()
        self._doubtful.shutdown()


class _Turns:
    """A thread goes to the tenant that has the fewest; to several with as few, in turn."""

    def __init__(self, threads: int, name: str) -> None:
        self._threads, self._pool = threads, ThreadPoolExecutor(threads, name)
        self._waiting: dict[str, deque[tuple[Callable[[], Any], asyncio.Future[Any]]]] = {}
        """Work of each tenant; the tenants in the order of their turns."""
        self._running: Counter[str] = Counter()

    def submit(self, tenant: str, work: Callable[[], T]) -> asyncio.Future[T]:
        outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append((work, outcome))
        self._start()
        return outcome

    def shutdown(self) -> None:
        for queue in self._waiting.values():
            for _, outcome in queue:
                outcome.cancel()
        self._waiting.clear()
        self._pool.shutdown(wait=False)

    def _start(self) -> None:
        """Begin what there are free threads for: the pool's own queue stays empty."""
        while self._waiting and self._running.total() < self._threads:
            tenant = min(self._waiting, key=self._running.__getitem__)
            queue = self._waiting.pop(tenant)
            work, outcome = queue.popleft()
            if queue:
                self._waiting[tenant] = queue  # behind the others
            if not outcome.cancelled():
                self._running[tenant] += 1
                loop = outcome.get_loop()
                self._pool.submit(work).add_done_callback(partial(self._tell, loop, tenant, outcome))

    def _tell(
        self, loop: asyncio.AbstractEventLoop, tenant: str, outcome: asyncio.Future[Any], done: Future[Any]
    ) -> None:
        """Called in the thread."""
        with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody waits any more
            loop.call_soon_threadsafe(self._end, tenant, outcome, done)

    def _end(self, tenant: str, outcome: asyncio.Future[Any], done: Future[Any]) -> None:
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
        if not outcome.done():
            error = done.exception()
            if error is None:
                outcome.set_result(done.result())
            else:
                outcome.set_exception(error)
        self._start()
