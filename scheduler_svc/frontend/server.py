"""The HTTP server of a frontend process: uvicorn with an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import socket
import struct
from collections.abc import Iterator

import structlog
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from scheduler_svc.frontend.frontend import Frontend

log = structlog.get_logger()

FLUSH_S = 1
"""What is left to send at the end gets so long to reach its clients."""
TURN_S = 0.05
MAX_UNSENT_BYTES = 128 << 10
"""What the system takes of an answer before the client has room for it."""


class HttpProtocol(HttpToolsProtocol):
    """Breaks connections whose clients do not read what is sent, and lets the application do so."""

    stalled_client_s = 60.0
    _stall: asyncio.TimerHandle | None = None
    _unread = 0
    """Bytes in the write buffer when the stall was looked at last."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["gilir.cut_off"] = self.cut_off  # type: ignore[typeddict-unknown-key]

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_stall()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._forget_stall()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._forget_stall()

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


class Server(uvicorn.Server):
    """On SIGTERM or SIGINT new requests get 503 while open ones go on; when those have ended, the process does.

    Requests that are open when the grace is over, or when a second signal comes, end with an error. Exit status 0.
    """

    def __init__(self, app: FastAPI, *, exit_with_parent: bool) -> None:
        self._frontend: Frontend = app.state.frontend
        stalled_client_s = self._frontend.settings.stalled_client_s
        config = uvicorn.Config(
            app,
            http=type("Protocol", (HttpProtocol,), {"stalled_client_s": stalled_client_s}),
            ws="none",
            loop="uvloop",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=FLUSH_S,
        )
        super().__init__(config)
        self._parent = os.getppid() if exit_with_parent else None
        self._num_signals = 0

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._handle_stop)
        yield
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)

    def _handle_stop(self) -> None:
        self._num_signals += 1
        if self._num_signals == 1:
            self._frontend.leaving = True
            self._stop_task = asyncio.get_running_loop().create_task(self._stop())

    async def _stop(self) -> None:
        """Refuse what the core has not heard of, wait for the rest, then let uvicorn close."""
        clock, link = asyncio.get_running_loop().time, self._frontend.link
        link.fail_all("the service is stopping", "shutting_down", submitted=False)
        end_at, idle_at = clock() + self._frontend.settings.grace_s, math.inf
        while link.generations and clock() < min(end_at, idle_at + FLUSH_S) and self._num_signals == 1:
            await asyncio.sleep(TURN_S)
            if not link.num_streams:
                idle_at = min(idle_at, clock())
        link.fail_all("the service is stopping", "shutting_down")
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        if counter % 10 == 0 and self._parent is not None and os.getppid() != self._parent:
            log.error("the parent process has gone")
            self._parent, self._frontend.leaving = None, True
            self._frontend.link.fail_all("the service is stopping", "shutting_down")
            self.should_exit = True
        return await super().on_tick(counter)


def run(app: FastAPI, listener: socket.socket, *, exit_with_parent: bool) -> None:
    """Serve on a listening socket until told to stop."""
    with contextlib.suppress(OSError, AttributeError):  # not TCP, or not Linux
        # Accepted connections inherit it. A slow reader is noticed soon, and costs the system little.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)
    Server(app, exit_with_parent=exit_with_parent).run([listener])
