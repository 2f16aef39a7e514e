"""A way to write the body of a streamed answer that needs no task for each of its parts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl


class BodyWriter:
    """Writes parts of an answer whose head, and nothing but it, says that it is chunked (RFC 9112, section 7.1).

    In use, the connection is full as soon as the system has not taken all that was written.
    """

    def __init__(self, transport: asyncio.Transport, flow: FlowControl) -> None:
        self._transport, self._flow = transport, flow
        self._on_room: Callable[[], None] | None = None

    def open(self, on_room: Callable[[], None]) -> None:
        """Begin. `on_room` is called whenever the connection is not full any more."""
        self._on_room = on_room
        self._limit(0)

    def close(self) -> None:
        """The last part goes the usual way."""
        self._on_room = None
        self._limit(HIGH_WATER_LIMIT)

    def _limit(self, unsent_bytes: int) -> None:
        if not self._transport.is_closing():  # else uvloop raises
            self._transport.set_write_buffer_limits(unsent_bytes)

    @property
    def is_full(self) -> bool:
        return self._flow.write_paused

    def write(self, part: bytes) -> None:
        """One chunk, not empty. Nothing is written on a connection that is closing."""
        if not self._transport.is_closing():
            self._transport.write(b"%x\r\n%b\r\n" % (len(part), part))

    def tell_room(self) -> None:
        """The system has taken all."""
        if self._on_room is not None:
            self._on_room()
