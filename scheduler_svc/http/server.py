"""uvicorn with our own protocol, told to end by signals or by the death of the parent process. Exit status 0."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from scheduler_svc.http.protocol import HttpProtocol

FLUSH_S = 1
"""What is left to send at the end gets so long to reach its clients."""


class Server(uvicorn.Server):
    """Serves one application. What it does before it ends is for subclasses, in `stop` and `orphaned`."""

    def __init__(self, app: FastAPI, *, stalled_client_s: float, exit_with_parent: bool) -> None:
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

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        yield
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)

    async def on_tick(self, counter: int) -> bool:
        if counter % 10 == 0 and self._parent is not None and os.getppid() != self._parent:
            self._parent = None
            self.orphaned()
        return await super().on_tick(counter)

    def stop(self) -> None:
        """SIGTERM or SIGINT has come, perhaps not for the first time."""
        self.should_exit = True

    def orphaned(self) -> None:
        """The parent process has gone."""
        self.should_exit = True
