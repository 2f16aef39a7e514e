"""A batch that is being run: which of its lines wait, which are in flight."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from scheduler_svc.batches.records import BatchRecord, Line, Status

PAGE = 64
"""Lines that are read ahead."""
MIN_BACKOFF_S, MAX_BACKOFF_S = 0.5, 30.0


@dataclass(slots=True)
class LiveBatch:
    """`running`: the tasks of lines in flight, by number of line."""

    record: BatchRecord
    running: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    checking: asyncio.Task[None] | None = None
    """Reads its input file."""
    _queue: deque[Line] = field(default_factory=deque)
    _last_number: int = 0
    _all_read: bool = False
    _resume_at: float = 0.0
    _backoff_s: float = 0.0

    @property
    def needs_lines(self) -> bool:
        return self.record.status == Status.IN_PROGRESS and not self._all_read and len(self._queue) < PAGE // 2

    @property
    def last_number(self) -> int:
        """Of the last line that was read."""
        return self._last_number

    def add(self, lines: list[Line]) -> None:
        """The next lines in the order of the file; none when there are no more."""
        self._queue.extend(lines)
        self._all_read = not lines
        if lines:
            self._last_number = lines[-1].number

    def is_ready(self, now: float) -> bool:
        """Whether a line may be started. `now`: monotonic."""
        return bool(self._queue) and now >= self._resume_at

    def take(self) -> Line:
        return self._queue.popleft()

    def give_back(self, line: Line) -> None:
        """It was not run after all."""
        self._queue.appendleft(line)

    def put_back(self, line: Line, now: float, retry_after_s: float) -> None:
        """It cannot be served now. The batch pauses, twice as long each time, and never shorter than it was told."""
        self.give_back(line)
        if now >= self._resume_at:
            self._backoff_s = min(MAX_BACKOFF_S, max(MIN_BACKOFF_S, 2 * self._backoff_s))
        self._resume_at = max(self._resume_at, now + max(self._backoff_s, min(retry_after_s, MAX_BACKOFF_S)))

    def went_well(self) -> None:
        self._backoff_s = 0.0

    @property
    def is_done(self) -> bool:
        """Whether every line has its result."""
        return self._all_read and not self._queue and not self.running

    async def stop(self) -> None:
        """Cancel what is under way, and wait until it has ended."""
        tasks = [*self.running.values(), *([self.checking] if self.checking is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
