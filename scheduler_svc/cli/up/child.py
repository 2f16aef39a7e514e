"""One service that is kept running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO

from common.processes import end_with_parent
from scheduler_svc.restarts import Restarts

TAIL = 15
"""Lines of its log that are kept, to be shown when it fails."""
FIRST_DELAY_S, LONGEST_DELAY_S, STABLE_S = 0.5, 30.0, 60.0
"""Of `Restarts`: for executors that may load for long before they fail."""


class Child:
    """`start` it; `check` now and then. Each line that it writes goes to `write`."""

    def __init__(
        self, name: str, arguments: list[str], write: Callable[[str, str], None], folder: Path | None = None
    ) -> None:
        """`arguments`: behind `python`. `write` is called with the name and a line, from a thread. `folder`: for its
        temporary files, which nobody else removes when it is killed; without it, where all have them.
        """
        self.name = name
        self._arguments, self._write = arguments, write
        self._environment = None if folder is None else {**os.environ, "TMPDIR": str(folder)}
        self.tail: deque[str] = deque(maxlen=TAIL)
        self.process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._restarts = Restarts(first_delay_s=FIRST_DELAY_S, longest_delay_s=LONGEST_DELAY_S, stable_s=STABLE_S)

    def start(self, now: float) -> None:
        """Call it in the main thread: the kernel ends the child with the thread that started it. Raises OSError."""
        self._restarts.started(now)
        # A session of its own: Ctrl-C reaches us alone, and what is left is ended in order.
        self.process = subprocess.Popen(
            [sys.executable, *self._arguments],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        assert self.process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True)
        self._reader.start()

    def _read(self, stream: IO[bytes]) -> None:
        with stream:
            for line in stream:
                text = line.decode(errors="replace").rstrip("\n")
                self.tail.append(text)
                self._write(self.name, text)

    def check(self, now: float) -> str:
        """Start it again where that is due. Returns a line to tell; empty where there is nothing."""
        if self.process is None:
            if now < self._restarts.due_at:
                return ""
            try:
                self.start(now)
            except OSError as error:  # the machine has no memory left for it, or no process
                return self._put_off(now, f"cannot be started: {error.strerror or error}")
            return f"{self.name}: started again"
        status = self.process.poll()
        if status is None:
            return ""
        self.process = None
        return self._put_off(now, f"ended with {ending(status)}")

    def _put_off(self, now: float, what: str) -> str:
        """When it is started again, as a line."""
        delay = self._restarts.ended(now)
        when = f"in {delay:g} s" if delay else "at once"
        return f"{self.name}: {what}, is started again {when}"

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        """Does nothing where it has ended."""
        if self.process is not None:
            self.process.send_signal(number)

    def last_words(self) -> list[str]:
        """What it said at its end: its lines of errors alone, where it said any.

        The thread that reads them is waited for; not long, as a process of its own may still hold the pipe.
        """
        if self._reader is not None:
            self._reader.join(1.0)
        lines = list(self.tail)  # at once: the thread may still add to it
        return [line for line in lines if line.startswith("error: ")] or lines


def ending(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
