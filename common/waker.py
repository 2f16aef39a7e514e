"""Wakes a thread that waits in a poller."""

from __future__ import annotations

import contextlib
import signal
import socket


class Waker:
    """Register it with the poller; `wake` makes it readable, from another thread or a signal handler.

    Python runs a signal's handler between two instructions of the main thread. One that comes between the last
    instruction before a poll and the poll itself does not end that poll: `wake_at_signals` does.
    """

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._wakes_at_signals = False

    def fileno(self) -> int:
        return self._reader.fileno()

    def wake_at_signals(self) -> None:
        """Every signal with a handler in Python wakes, too, until it is closed. Main thread only."""
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._wakes_at_signals = True

    def wake(self) -> None:
        with contextlib.suppress(OSError):
            self._writer.send(b"\0")

    def clear(self) -> None:
        """Call it after each wait, before what it was woken for is looked at."""
        with contextlib.suppress(OSError):
            while self._reader.recv(4096):
                pass

    def close(self) -> None:
        """In the main thread, where it wakes at signals."""
        if self._wakes_at_signals:
            signal.set_wakeup_fd(-1)
        self._reader.close()
        self._writer.close()
