"""The HTTP server of a frontend process: uvicorn with an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import socket
from collections.abc import Iterator

import structlog
import uvicorn
from fastapi import FastAPI

from scheduler_svc.frontend.frontend import Frontend
from scheduler_svc.frontend.http_protocol import HttpProtocol

log = structlog.get_logger()

FLUSH_S = 1
"""What is left to send at the end gets so long to reach its clients."""
TURN_S = 0.05
MAX_UNSENT_BYTES = 128 << 10
"""What the system takes of an answer before the client has room for it."""


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
