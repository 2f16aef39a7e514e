"""How the server speaks HTTP/1.1, where uvicorn's own way would lose a body, hang, or answer in another shape."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

import orjson
import structlog
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from scheduler_svc.http.body_writer import BodyWriter
from scheduler_svc.http.errors import ApiError
from scheduler_svc.http.plain_parser import PlainParser

log = structlog.get_logger()

MAX_HEAD_BYTES = 64 << 10
"""Of a request's line and headers, to within what is parsed at a time."""
PARSED_AT_ONCE = 4096
"""Bytes, so many that a body takes few turns, and so few that they hold some hundred requests at most."""
MAX_PIPELINED = 8
"""Requests of a connection that may wait for the one before them. What came behind them is kept as the bytes that it
is: as requests, they would take a hundred times the memory.
"""
MAX_HELD_BYTES = 64 << 10
"""With more of those bytes, no more is read."""


class _Flow(FlowControl):
    """`holds`: much that was read is not parsed yet, so nothing more is read, whoever asks for it."""

    holds = False

    def resume_reading(self) -> None:
        if not self.holds:
            super().resume_reading()


class HttpProtocol(HttpToolsProtocol):
    """Breaks connections whose clients do not read what is sent, and lets the application do so.

    A wish to change protocols is passed over, as RFC 9110 section 7.8 allows, and the request served as it stands.
    """

    stalled_client_s = 60.0
    _stall: asyncio.TimerHandle | None = None
    _unread = 0
    """Bytes in the write buffer when the stall was looked at last."""
    _head_bytes: int | None = 0
    """Received since the last request, all of it head so far; None while a body is read."""
    _held = b""
    """Received, and not parsed yet."""
    _running: RequestResponseCycle | None = None
    """The request that is being answered. uvicorn's `cycle` is the last that came, and told alone of a disconnect."""
    _patience: asyncio.TimerHandle | None = None
    """Runs while a head is awaited: on a new connection, and once a part of one has come. Also while the rest of a body
    comes that was answered already: each byte of it would end uvicorn's wait for the next request."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._plain = PlainParser(self)
        self.parser = self._plain  # type: ignore[assignment]

    # --- reading ---

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = self._flow = _Flow(transport)
        self._body_writer = BodyWriter(transport, self._flow)
        self._await_head()

    def _await_head(self) -> None:
        if self._patience is None:
            self._patience = self.loop.call_later(self.stalled_client_s, self._lose_patience)

    def _lose_patience(self) -> None:
        self._patience = None
        if self.cycle is None or self.cycle.response_complete:
            if self._head_bytes is None:  # the rest of a request that has its answer
                self.transport.close()
                return
            text = f"no whole request came within {self.stalled_client_s:g} s"
            self._refuse(ApiError(408, text, code="client_timeout"))
        else:  # the one before it is still being answered
            self._await_head()

    def _forget_head(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def data_received(self, data: bytes) -> None:
        self._held += data
        self._parse()

    def _parse(self) -> None:
        """Go on with what has come, until too many requests wait."""
        held, place = self._held, 0
        while place < len(held) and len(self.pipeline) < MAX_PIPELINED and not self.transport.is_closing():
            self._parse_part(held[place : place + PARSED_AT_ONCE])
            place += PARSED_AT_ONCE
        self._held = held[place:]
        # Only who reads hears that the client leaves: so that is given up no sooner than it must be.
        self._flow.holds = len(self._held) > MAX_HELD_BYTES
        if self._flow.holds:
            self._flow.pause_reading()

    def _parse_part(self, data: bytes) -> None:
        if self._head_bytes is not None:
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(ApiError(431, f"the headers are larger than {MAX_HEAD_BYTES} bytes"))
                return
            self._head_bytes += len(data)
        super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._await_head()
        self.scope["gilir.cut_off"] = self.cut_off  # type: ignore[typeddict-unknown-key]
        self.scope["gilir.body_writer"] = self._body_writer  # type: ignore[typeddict-unknown-key]

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_bytes is not None:  # what comes behind a body was not there when the request was judged
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._head_bytes = None
        self._forget_head()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self._plain.wants_upgrade():  # else its body is still to come
            self._head_bytes = 0
            super().on_message_complete()
            if self.cycle.response_complete:
                self._forget_head()
                self._await_head()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._head_bytes is None and self.cycle.response_complete:
            self._await_head()
        if self._held and not self.transport.is_closing():
            self._parse()
            self._flow.resume_reading()

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, msg, code="invalid_http"))

    def _refuse(self, error: ApiError) -> None:
        """Answer what is no HTTP that can be served, and close; never in the place of another request's answer."""
        if self.transport.is_closing():
            return
        idle = self.cycle is None or self.cycle.response_complete
        if idle or (self._head_bytes is None and not self.cycle.response_started and not self.pipeline):
            content = orjson.dumps(error.body)
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(content)
            self.transport.write(STATUS_LINE[error.status] + head + content)
        self.transport.close()

    # --- slow readers ---

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_stall()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._forget_stall()
        self._body_writer.tell_room()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._held = b""
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        self._forget_stall()
        self._forget_head()

    def _forget_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _watch_stall(self) -> None:
        self._unread = self.transport.get_write_buffer_size()
        self._stall = self.loop.call_later(self.stalled_client_s, self._check_stall)

    def _check_stall(self) -> None:
        if self.transport.get_write_buffer_size() < self._unread:
            self._watch_stall()
            return
        log.warning("a client does not read: cut off", unread_bytes=self._unread)
        self.cut_off()

    def cut_off(self) -> None:
        """Break the connection, and drop what the system still holds for it."""
        connection = self.transport.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()
