"""The numbered events of one streamed answer, as long as they are kept, and who reads them."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import orjson

from scheduler_svc.frontend.sse import DONE
from scheduler_svc.http.errors import ApiError, ClientGone, invalid

EVENT_BYTES = 48
"""What an event takes beside its bytes."""
STREAM_BYTES = 1024
"""What is counted for a stream without events."""
PIECE_BYTES = 1 << 16
"""About so much is given to a connection at a time: it holds that as long as its client does not read, beside what is
kept here, and so does each one from which the stream was taken over.
"""

LAST_EVENT_ID = "Last-Event-ID"


def last_event(error: ApiError) -> bytes:
    """The end of one reading that went wrong. It has no id: it is no part of the answer."""
    return b"data: " + orjson.dumps(error.body) + b"\n\n" + DONE


TAKEN = last_event(ApiError(409, "The stream was taken up by another connection.", code="stream_taken"))


def not_kept(message: str) -> ApiError:
    """410: there was such a stream, or a part of it."""
    return ApiError(410, message, code="events_gone")


class StreamReading(Protocol):
    """One connection's way through a stream, wherever it is kept."""

    cut_off: Callable[[], object] | None
    """Breaks the connection that the events go to."""

    async def begin(self) -> bool:
        """Wait until the answer has begun; whether anything of it is left to read.

        Raises `ApiError` when it is an error, `ClientGone` after `leave`.
        """

    async def read(self) -> tuple[bytes, bool]:
        """Events that were not read yet, and whether more follow. Those read before count as sent.

        Raises `ClientGone` after `leave`.
        """

    def leave(self) -> None:
        """The connection is over. Safe to call again."""


class KeptStream:
    """Event n of the stream has the id n, from 1 on. At most one reads it: a second one takes it over."""

    def __init__(
        self,
        cancel: Callable[[], None],
        on_bytes: Callable[[KeptStream, int], None],
        on_turn: Callable[[KeptStream], None],
    ) -> None:
        """`cancel`: ends the work for the answer, if it goes on. `on_bytes`: told how many came or went. `on_turn`:
        told of a reader that comes or leaves, and of the end.
        """
        self.cancel, self._on_bytes, self._on_turn = cancel, on_bytes, on_turn
        self.started = time.monotonic()
        """On the machine's clock, which all its processes share."""
        self._events: deque[bytes] = deque()
        self.size = STREAM_BYTES
        self.last = 0
        """The newest event's id."""
        self.ended = False
        self.failure: ApiError | None = None
        """Said in the place of events to whoever asks: the answer is an error, or is kept no more."""
        self._sent = 0
        """The newest event that its reader has, as far as is known here."""
        self._reading: LocalReading | None = None

    # --- writing ---

    def append(self, data: bytes, max_bytes: int) -> bool:
        """Number the events of `data`, whole ones that each end with an empty line.

        Of what has been sent the oldest gives way when there is more than `max_bytes`. Returns whether that sufficed.
        """
        before = self.size
        for event in data.split(b"\n\n")[:-1]:
            self.last += 1
            numbered = b"id: %d\n%s\n\n" % (self.last, event)
            self._events.append(numbered)
            self.size += len(numbered) + EVENT_BYTES
        self._trim(max_bytes)
        fits = self.size <= max_bytes
        self._tell()
        self._on_bytes(self, self.size - before)
        return fits

    def end(self) -> None:
        """The last event has come."""
        self.ended = True
        self._tell()
        self._on_turn(self)

    def fail(self, error: ApiError) -> None:
        """The answer is an error, without events."""
        self.failure = error
        self.end()

    def drop(self) -> None:
        """It is kept no more, and is not found any more."""
        self.failure, self.ended = not_kept("The stream is kept no more."), True
        self.cancel()

    def give_up(self, error: ApiError) -> None:
        """Keep nothing more than this error. Work that goes on is cancelled, a connection that reads is broken."""
        reading, self._reading = self._reading, None
        freed, self.size = STREAM_BYTES - self.size, STREAM_BYTES
        self._events.clear()
        self.failure, self.ended = error, True
        self.cancel()
        if reading is not None:
            reading.leave()
            if reading.cut_off is not None:
                reading.cut_off()
        self._on_bytes(self, freed)
        self._on_turn(self)

    def forget_sent(self) -> bool:
        """Give up the events that were sent. Returns whether there were any."""
        before = self.size
        self._trim(STREAM_BYTES)
        self._on_bytes(self, self.size - before)
        return self.size < before

    def _trim(self, max_bytes: int) -> None:
        while self.size > max_bytes and self._events and self.first <= self._sent:
            self.size -= len(self._events.popleft()) + EVENT_BYTES

    def _tell(self) -> None:
        if self._reading is not None:
            self._reading.news.set()

    # --- reading ---

    @property
    def first(self) -> int:
        """The id of the oldest event that is kept."""
        return self.last + 1 - len(self._events)

    @property
    def is_read(self) -> bool:
        return self._reading is not None

    def open(self, after: int) -> LocalReading:
        """Begin to read after an event, which counts as sent. Who has read until now reads no more.

        Raises `ApiError` 410 for events that are not kept, 400 for an event that has not been, and the answer's own
        error where it is one.
        """
        if self.failure is not None:
            raise self.failure.with_traceback(None)
        if after > self.last:
            raise invalid(LAST_EVENT_ID, f"{LAST_EVENT_ID}: the last event so far is {self.last}")
        if after + 1 < self.first:
            raise not_kept(f"The stream is kept from event {self.first} on only.")
        if self._reading is not None:
            self._reading.give_way()
        self._sent = after
        self._reading = LocalReading(self, after)
        self._on_turn(self)
        return self._reading

    def after(self, number: int) -> tuple[bytes, int]:
        """Of the events after this one the next `PIECE_BYTES`, at least one if there is one; and the last one's id."""
        events, size, place = [], 0, number + 1 - self.first
        while place < len(self._events) and size < PIECE_BYTES:
            events.append(self._events[place])
            size += len(events[-1])
            place += 1
        return b"".join(events), number + len(events)

    def sent(self, number: int) -> None:
        self._sent = max(self._sent, number)

    def close(self, reading: LocalReading) -> None:
        """This reading is over, if it has not been taken over."""
        if self._reading is reading:
            self._reading = None
            self._on_turn(self)


class LocalReading:
    """A `StreamReading` of a stream that is kept in this process."""

    def __init__(self, stream: KeptStream, after: int) -> None:
        self._stream, self._position = stream, after
        self.cut_off: Callable[[], object] | None = None
        self.news = asyncio.Event()
        self._taken = self._left = False

    async def begin(self) -> bool:
        stream = self._stream
        while not (stream.last or stream.ended or self._left or self._taken):
            await self._wait()
        self._check()
        if stream.failure is not None:
            raise stream.failure.with_traceback(None)
        return not stream.ended or stream.last > self._position

    async def read(self) -> tuple[bytes, bool]:
        stream = self._stream
        if not (self._taken or self._left):
            stream.sent(self._position)
        while not (self._taken or self._left or stream.ended or stream.last > self._position):
            await self._wait()
        self._check()
        if self._taken:
            return TAKEN, False
        body, self._position = stream.after(self._position)
        return body, not stream.ended or self._position < stream.last

    async def _wait(self) -> None:
        self.news.clear()
        await self.news.wait()

    def _check(self) -> None:
        if self._left:
            raise ClientGone

    def give_way(self) -> None:
        """Another reading goes on in the place of this one."""
        self._taken = True
        self.news.set()

    def leave(self) -> None:
        self._left = True
        self.news.set()
        self._stream.close(self)
