"""`gilir top`: the iterations, the queue and the executors of a server, in a terminal."""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import select
import shutil
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Group
from rich.live import Live

from common.command_parser import command_parser
from scheduler_svc.cli.connection import Connection, understanding
from scheduler_svc.cli.errors import CommandError
from scheduler_svc.cli.parsing import add_server, key_of
from scheduler_svc.cli.terminal import plain_console
from scheduler_svc.cli.top.frame import frame
from scheduler_svc.cli.top.picture import Picture

EVENTS = "/dashboard/events"
FRAME_S = 0.25
FIRST_S, ONCE_S = 10.0, 2.5
"""To wait for the first look at the queue; then, for one frame, for the second figures, so that there are rates."""
AGAIN_S = 1.5
DESCRIPTION = """Watches a server of Gilir: who runs and who waits, for what, tokens a second, latency of the last
minute, and each executor's seats, KV blocks (held + only cached), time and tokens of an iteration. It reads what
the live page reads, /dashboard/events. Keys: q quits, p pauses."""
EXAMPLES = """
  gilir top
  gilir top --url http://gpu-host:8000
  gilir top --once | head -3
"""
Event = tuple[str, dict[str, Any]]


def parser(prog: str) -> argparse.ArgumentParser:
    made = command_parser(prog, DESCRIPTION, EXAMPLES)
    add_server(made)
    made.add_argument("--once", action="store_true", help="print one frame, and end")
    return made


def main(arguments: list[str], prog: str) -> int:
    """Exit status 0; 1 with one plain line where the server cannot be watched."""
    options = parser(prog).parse_args(arguments)
    if not options.once and not sys.stdout.isatty():
        raise CommandError("this is no terminal: give --once for one frame")
    with Connection(options.url, key_of(options), key_hint="GILIR_API_KEY or --api-key") as connection:
        listener = Listener(connection, again=not options.once)
        listener.wait_for_status()
        if options.once:
            listener.wait_for_rates()
            _print(listener.picture, connection.url)
        else:
            _show(listener, connection.url)
    return 0


class Listener:
    """Reads the events in a thread; `pump` puts them into the picture, in the caller's."""

    def __init__(self, connection: Connection, *, again: bool) -> None:
        """`again`: dial anew, for ever, once there was a connection."""
        self.picture = Picture()
        self._connection, self._again = connection, again
        self._events: queue.Queue[Event | CommandError] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while True:
            try:
                with self._connection.events(EVENTS) as events:
                    for event in events:
                        self._events.put(event)
                self._events.put(CommandError("the server has ended the connection"))
            except CommandError as error:
                self._events.put(error)
            if not self._again:
                return
            time.sleep(AGAIN_S)

    def pump(self, timeout_s: float) -> None:
        """Take what has come; where nothing has, wait for it. Raises `CommandError` where there never was anything."""
        with contextlib.suppress(queue.Empty):
            event = self._events.get(timeout=timeout_s) if timeout_s else self._events.get_nowait()
            while True:
                if not isinstance(event, CommandError):
                    self.picture.trouble = ""
                    with understanding(self._connection.url):
                        self.picture.take(*event)
                elif not (self.picture.status and self._again):
                    raise event
                else:
                    self.picture.trouble = str(event)
                event = self._events.get_nowait()

    def wait_for_status(self) -> None:
        deadline = time.monotonic() + FIRST_S
        while not self.picture.status:
            if time.monotonic() > deadline:
                raise CommandError(self.picture.trouble or f"{self._connection.url} tells nothing of itself")
            self.pump(FRAME_S)

    def wait_for_rates(self) -> None:
        """While nothing happens there are none; then it takes `ONCE_S`."""
        deadline = time.monotonic() + ONCE_S
        while not self.picture.has_rates and time.monotonic() < deadline:
            self.pump(FRAME_S)


def _print(picture: Picture, url: str) -> None:
    width, height = shutil.get_terminal_size()
    console = plain_console(width)
    with understanding(url):
        lines = frame(picture, url, width, height)
    for line in lines:
        console.print(line)


def _show(listener: Listener, url: str) -> None:
    """Until q, or Ctrl-C."""
    console = plain_console()
    paused = False
    with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            is_pause = False
            for key in pressed(FRAME_S):
                if key in "qQ":
                    return
                is_pause = key in "pP "
                paused ^= is_pause
            listener.pump(0)
            if not paused or is_pause:
                size = console.size
                with understanding(url):
                    lines = frame(listener.picture, url, size.width, size.height, state="paused" if paused else "")
                lines[0].no_wrap = True
                live.update(Group(*lines), refresh=True)


def _no_keys(seconds: float) -> str:
    time.sleep(seconds)
    return ""


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Gives a function: the keys that were pressed, for which it waits so many seconds."""
    if not sys.stdin.isatty():
        yield _no_keys
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def pressed(seconds: float) -> str:
        ready, _, _ = select.select([descriptor], [], [], seconds)
        return os.read(descriptor, 64).decode(errors="ignore") if ready else ""

    try:
        tty.setcbreak(descriptor)
        yield pressed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
