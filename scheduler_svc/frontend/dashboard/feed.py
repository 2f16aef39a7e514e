"""What all viewers of a frontend process are shown: one question to the core at a time, whatever their number."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from itertools import islice
from typing import Protocol

import structlog

from common.wire import Iterations, SeenBlocks, SeenLane, SeenSequence, SeenWaiting
from scheduler_svc.frontend.dashboard.rendering import render_rows
from scheduler_svc.http.errors import ApiError

log = structlog.get_logger()

MAX_VIEWERS = 16
"""At a time, of one frontend process."""
TURN_S = 0.1
"""Between two questions to the core."""
STATUS_S = 0.5
"""Between two that ask for the queue and the KV blocks as well."""
HISTORY = 1024
"""Iterations that are kept, for new viewers."""
MAX_NAMES = 1 << 14
PATIENCE_S = 1.0
"""Before the next question to a core that did not answer."""


class Ask(Protocol):
    """As `Watches.ask`."""

    def __call__(self, after: int, *, status: bool) -> Awaitable[Iterations]: ...


class Feed:
    """`join`, `leave`; in between, `changed` waits for news, and the rest tells them. The last who leaves ends it."""

    def __init__(self, ask: Ask, clock: Callable[[], float] = time.monotonic) -> None:
        self._ask, self._clock = ask, clock
        self.num_viewers = 0
        self._task: asyncio.Task[None] | None = None
        self._forget()

    def _forget(self) -> None:
        self.newest = 0
        """The number of the newest iteration here."""
        self.lanes: tuple[SeenLane, ...] = ()
        self.waiting: tuple[SeenWaiting, ...] = ()
        self.num_waiting: dict[str, int] = {}
        self.status = 0
        """Rises with each look at the queue and the blocks."""
        self.blocks: tuple[SeenBlocks, ...] = ()
        self.num_named = 0
        self.failure = ""
        """Why nothing new comes; empty while it does."""
        self._rows: deque[bytes] = deque(maxlen=HISTORY)
        """As JSON, the newest last; their numbers follow one another."""
        self._names: deque[SeenSequence] = deque(maxlen=MAX_NAMES)
        self._news = asyncio.Event()

    def join(self) -> None:
        """One more viewer. Raises `ApiError` 503 when there are too many."""
        if self.num_viewers >= MAX_VIEWERS:
            text = f"{MAX_VIEWERS} viewers watch already"
            raise ApiError(503, text, code="too_many_viewers", headers={"retry-after": "10"})
        self.num_viewers += 1
        if self._task is None:
            self._forget()
            self._task = asyncio.get_running_loop().create_task(self._run())

    def leave(self) -> None:
        """A viewer has gone."""
        self.num_viewers -= 1
        if not self.num_viewers and self._task is not None:
            self._task.cancel()
            self._task = None

    async def changed(self) -> None:
        """Wait for news, but no longer than a second."""
        try:
            await asyncio.wait_for(self._news.wait(), PATIENCE_S)
        except TimeoutError:
            return

    # --- telling ---

    def rows_after(self, number: int, limit: int) -> tuple[int, list[bytes]]:
        """At most `limit` rows above `number`, as far as they are kept, and the number of the first."""
        oldest = self.newest - len(self._rows) + 1
        first = max(oldest, number + 1)
        return first, list(islice(self._rows, first - oldest, first - oldest + limit))

    def names_after(self, count: int) -> list[SeenSequence]:
        """Sequences that were named after the first `count`, as far as they are kept."""
        kept = len(self._names)
        return list(islice(self._names, max(0, kept - (self.num_named - count)), None))

    # --- asking ---

    async def _run(self) -> None:
        status_at = 0.0
        while True:
            wants_status = self._clock() >= status_at
            try:
                answer = await self._ask(self.newest, status=wants_status)
            except ApiError as error:
                self.failure = error.message
                self._tell()
                await asyncio.sleep(PATIENCE_S)
                continue
            self.failure = ""
            self._take(answer)
            if wants_status:
                status_at = self._clock() + STATUS_S
                self.waiting, self.num_waiting, self.blocks = answer.waiting, answer.num_waiting, answer.blocks
                self.status += 1
            self._tell()
            # What is left of a long answer comes soon, but lets others go first.
            await asyncio.sleep(TURN_S if self.newest >= answer.newest else TURN_S / 4)

    def _take(self, answer: Iterations) -> None:
        if answer.first != self.newest + 1:
            self._rows.clear()  # numbers follow one another: what was missed cannot be shown
        self._rows.extend(render_rows(answer))
        self.newest = answer.first + len(answer.epochs) - 1
        self._names.extend(answer.sequences)
        self.num_named += len(answer.sequences)
        self.lanes = answer.lanes

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()
