"""Questions to the core that have one answer each, by number."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from scheduler_svc.http.errors import unavailable
from scheduler_svc.http.patience import patience

MAX_PENDING = 64
TIMEOUT_S = 2.0
NUMBERS = 1 << 32

A = TypeVar("A")


class Questions(Generic[A]):
    """`ask` waits for the answer that `take` is given."""

    def __init__(self) -> None:
        self._pending: dict[int, asyncio.Future[A]] = {}
        self._last_number = 0

    def __len__(self) -> int:
        return len(self._pending)

    async def ask(self, send: Callable[[int], Awaitable[None]]) -> A:
        """`send` is given the number of the question. Raises `ApiError` 503 when no answer comes soon."""
        if len(self._pending) >= MAX_PENDING:
            raise unavailable("too many questions at a time", "busy", retry_after_s=1)
        # Far more numbers than pending questions: none comes again while it is awaited.
        self._last_number = number = (self._last_number + 1) % NUMBERS
        answer: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._pending[number] = answer
        try:
            await send(number)
            async with patience(TIMEOUT_S):
                return await answer
        except TimeoutError:
            raise unavailable("the scheduler does not answer", "no_scheduler") from None
        finally:
            del self._pending[number]

    def take(self, number: int, answer: A) -> None:
        """An answer came; one that nobody waits for any more is dropped."""
        pending = self._pending.get(number)
        if pending is not None and not pending.done():
            pending.set_result(answer)
