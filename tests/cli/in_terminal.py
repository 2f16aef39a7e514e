"""Runs a command of `gilir` in a terminal of its own."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from deploy.local import ROOT

PATIENCE_S = 60.0


class InTerminal:
    """80 columns and 24 lines. `shown` is all that was written so far."""

    def __init__(self, command: list[str], environment: dict[str, str] | None = None) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        environment = {**os.environ, "TERM": "xterm-256color", **(environment or {})}
        for name in ("COLUMNS", "LINES"):
            environment.pop(name, None)
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=_take_terminal
        )
        os.close(theirs)
        self.shown = ""

    @classmethod
    def gilir(cls, *arguments: str) -> Self:
        return cls([sys.executable, "-m", "scheduler_svc.cli", *arguments])

    def press(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def interrupt(self) -> None:
        """Ctrl-C, once the command waits: between its last instruction and the wait for a key, Python would note the
        signal, and wait nevertheless until the next key.
        """
        deadline = time.monotonic() + PATIENCE_S
        while _state(self.process.pid) != "S":
            assert time.monotonic() < deadline, "it does not come to rest"
            time.sleep(0.001)
        self.press("\x03")

    def wait_for(self, text: str) -> None:
        """Until the text has been written, since the last such call. Raises AssertionError where it is not."""
        deadline = time.monotonic() + PATIENCE_S
        while text not in self.shown:
            assert time.monotonic() < deadline, f"{text!r} did not come; there is {self.shown!r}"
            assert self._read(), f"the command has ended; there is {self.shown!r}"
        self.shown = self.shown.partition(text)[2]

    def end(self) -> int:
        """The exit status; what is still written is read."""
        deadline = time.monotonic() + PATIENCE_S
        while self._read():
            assert time.monotonic() < deadline, f"it does not end; there is {self.shown!r}"
        return self.process.wait(PATIENCE_S)

    def _read(self) -> bool:
        """False where nobody writes any more."""
        ready, _, _ = select.select([self._ours], [], [], 0.5)
        if not ready:
            return self.process.poll() is None
        try:
            data = os.read(self._ours, 1 << 16)
        except OSError:  # how Linux tells that the other end is closed
            return False
        self.shown += data.decode(errors="replace")
        return bool(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._ours)


def _state(pid: int) -> str:
    """As of proc(5): S is one that sleeps."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _take_terminal() -> None:
    """So that Ctrl-C in this terminal reaches this process, even where the tests run in the background"""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
