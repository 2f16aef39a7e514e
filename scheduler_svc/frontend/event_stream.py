"""The streamed answer of a call, as an ASGI application."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from scheduler_svc.frontend.call import Call
from scheduler_svc.frontend.sse import ChunkWriter
from scheduler_svc.http.errors import ApiError, ClientGone, internal

log = structlog.get_logger()

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Connection(Protocol):
    """Where events go; see `BodyWriter`."""

    @property
    def is_full(self) -> bool: ...

    def open(self, on_room: Callable[[], None]) -> None: ...

    def close(self) -> None: ...

    def write(self, part: bytes) -> None: ...


class EventStream(Response):
    """Sends events as they come, all that have come at once. `first`: those that are there already."""

    def __init__(self, call: Call, writer: ChunkWriter, first: bytes, on_end: Callable[[], None]) -> None:
        super().__init__()
        self._call, self._writer, self._first, self._on_end = call, writer, first, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._call.generation.cut_off = scope.get("gilir.cut_off")
        connection: Connection | None = scope.get("gilir.body_writer")
        try:
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            body, more = self._first, not self._call.done
            while True:
                await send({"type": "http.response.body", "body": body, "more_body": more})
                if not more:
                    return
                if connection is None:  # another server than our own
                    body, more = await next_events(self._call, self._writer)
                else:
                    body, more = await Delivery(self._call, self._writer, connection).last_events(), False
        except ClientGone:
            return
        finally:
            self._on_end()


class Delivery:
    """Writes events in the turn in which the core's news are read, without a task's turn for each.

    While the connection is full nothing is written. Tokens gather in their streams meanwhile, and make one event of
    each choice when there is room again.
    """

    def __init__(self, call: Call, writer: ChunkWriter, connection: Connection) -> None:
        self._call, self._writer, self._connection = call, writer, connection
        self._last: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def last_events(self) -> bytes:
        """Returns them when all others are written. Raises `ClientGone`."""
        generation = self._call.generation
        self._connection.open(self._advance)
        generation.listener = self._advance
        try:
            self._advance()
            return await self._last
        finally:
            generation.listener = None
            self._connection.close()

    def _advance(self) -> None:
        """There are news, or there is room."""
        if self._last.done():
            return
        generation = self._call.generation
        generation.sending = self._connection.is_full and not generation.is_over
        if generation.sending:
            return
        try:
            body, more = events_now(self._call, self._writer)
        except ClientGone as gone:
            self._last.set_exception(gone)
            return
        if not more:
            self._last.set_result(body)
        elif body:
            self._connection.write(body)


async def next_events(call: Call, writer: ChunkWriter) -> tuple[bytes, bool]:
    """The next events, and whether more follow. What goes wrong becomes the last. Raises `ClientGone`."""
    try:
        return await call.chunks(writer), not call.done
    except ClientGone:
        raise
    except Exception as error:
        return _told(error, writer), False


def events_now(call: Call, writer: ChunkWriter) -> tuple[bytes, bool]:
    """Likewise, of what has come: perhaps nothing."""
    try:
        return call.write_news(writer), not call.done
    except ClientGone:
        raise
    except Exception as error:
        return _told(error, writer), False


def _told(error: Exception, writer: ChunkWriter) -> bytes:
    """What was written before an error, and the error."""
    if not isinstance(error, ApiError):
        log.error("stream failed", exc_info=error)
        error = internal()
    writer.add_error(error)
    return writer.take()
