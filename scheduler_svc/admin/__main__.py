"""`python -m scheduler_svc.admin`: the admin process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from common.logs import configure_logs
from scheduler_svc.admin.app import create_app
from scheduler_svc.admin.key import AdminKey
from scheduler_svc.admin.settings import AdminSettings


class Server(uvicorn.Server):
    """Ends at SIGTERM with status 0, and when its parent has gone."""

    def __init__(self, app: FastAPI) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=1,
            )
        )
        self._parent = os.getppid()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._handle_stop)
        yield
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)

    def _handle_stop(self) -> None:
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        if counter % 10 == 0 and os.getppid() != self._parent:
            self.should_exit = True
        return await super().on_tick(counter)


def main() -> int:
    settings = AdminSettings.from_command_line(prog="python -m scheduler_svc.admin")
    configure_logs("admin", settings.log_format, settings.log_level)
    try:
        key = None if settings.key_file is None else AdminKey.read(settings.key_file)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    Server(create_app(settings.core, key)).run([socket.socket(fileno=settings.fd)])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
