"""The HTTP server of a frontend process: at its end, open requests are answered."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket

import structlog
from fastapi import FastAPI

from scheduler_svc.frontend.frontend import Frontend
from scheduler_svc.http.server import FLUSH_S, Server

log = structlog.get_logger()

TURN_S = 0.05
MAX_UNSENT_BYTES = 128 << 10
"""What the system takes of an answer before the client has room for it."""


class FrontendServer(Server):
    """On SIGTERM or SIGINT new requests get 503 while open ones go on; when those have ended, the process does.

    Requests that are open when the grace is over, or when a second signal comes, end with an error.
    """

    def __init__(self, app: FastAPI, *, exit_with_parent: bool) -> None:
        self._frontend: Frontend = app.state.frontend
        stalled_client_s = self._frontend.settings.stalled_client_s
        super().__init__(app, stalled_client_s=stalled_client_s, exit_with_parent=exit_with_parent)
        self._num_signals = 0

    def stop(self) -> None:
        self._num_signals += 1
        if self._num_signals == 1:
            self._frontend.leaving = True
            self._stop_task = asyncio.get_running_loop().create_task(self._stop())

    async def _stop(self) -> None:
        """Refuse what the core has not heard of, wait for the rest, then let uvicorn close."""
        clock, link, peers = asyncio.get_running_loop().time, self._frontend.link, self._frontend.peers
        link.fail_all("the service is stopping", "shutting_down", submitted=False)
        end_at, idle_at = clock() + self._frontend.settings.grace_s, math.inf
        while (
            (link.generations or peers.readings) and clock() < min(end_at, idle_at + FLUSH_S) and self._num_signals == 1
        ):
            await asyncio.sleep(TURN_S)
            if not (link.num_streams or peers.readings):
                idle_at = min(idle_at, clock())
        link.fail_all("the service is stopping", "shutting_down")
        self.should_exit = True

    def orphaned(self) -> None:
        log.error("the parent process has gone")
        self._frontend.leaving = True
        self._frontend.link.fail_all("the service is stopping", "shutting_down")
        super().orphaned()


def run(app: FastAPI, listener: socket.socket, *, exit_with_parent: bool) -> None:
    """Serve on a listening socket until told to stop."""
    with contextlib.suppress(OSError, AttributeError):  # not TCP, or not Linux
        # Accepted connections inherit it. A slow reader is noticed soon, and costs the system little.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)
    FrontendServer(app, exit_with_parent=exit_with_parent).run([listener])
