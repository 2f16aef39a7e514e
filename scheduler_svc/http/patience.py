"""How long another process may take to answer, as time in which this one could have heard it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

TURNS = 8
"""Stalls after which it ends, too, though nothing else was waited for."""


@asynccontextmanager
async def patience(seconds: float) -> AsyncIterator[None]:
    """Raises TimeoutError like `asyncio.timeout`, but is not used up by a stall of this process.

    A loop that comes back late finds the answer and the deadline at once, and would look at the deadline. Here the time
    is taken in turns, between which the loop reads what has come; a stall uses up one of them.
    """
    loop = asyncio.get_running_loop()
    left = TURNS
    timer: asyncio.TimerHandle
    async with asyncio.timeout(None) as limit:

        def turn() -> None:
            nonlocal left, timer
            left -= 1
            if left:
                timer = loop.call_later(seconds / TURNS, turn)
            else:
                limit.reschedule(loop.time())

        timer = loop.call_later(seconds / TURNS, turn)
        try:
            yield
        finally:
            timer.cancel()
