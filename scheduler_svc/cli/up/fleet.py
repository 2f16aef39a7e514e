"""The processes together: started, kept alive, and ended in order."""

from __future__ import annotations

import signal
import time
from types import FrameType

from common.logs import COMPILING
from common.probe import answers
from scheduler_svc.cli.up.child import Child, ending
from scheduler_svc.cli.up.console import Console

TURN_S = 0.1
"""Between two looks at the processes."""
LEEWAY_S = 10.0
"""Beyond its grace, before a process that was asked to end is killed."""
EXECUTORS_S = 15.0
"""Before executors that were asked to end are killed."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Failed(Exception):
    """A process ended before the service was ready. `status`: what to exit with; the arguments are plain lines."""

    def __init__(self, status: int, *lines: str) -> None:
        super().__init__(*lines)
        self.status = status


class Fleet:
    """A scheduler and executors. Use it from the main thread.

    The first signal ends it in order, a second one does not wait for what still runs, a third kills.
    """

    def __init__(self, scheduler: Child, executors: list[Child], console: Console, url: str, grace_s: float) -> None:
        self._scheduler, self._executors, self._console = scheduler, executors, console
        self._url, self._grace_s = url, grace_s
        self._num_signals = 0  # no Event: that has a lock, which the handler may find taken by what it interrupts
        for number in SIGNALS:
            signal.signal(number, self._handle)

    @property
    def _all(self) -> list[Child]:
        return [self._scheduler, *self._executors]

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        self._num_signals += 1
        if self._num_signals > 1:
            for child in self._all:
                child.signal(signal.SIGTERM if self._num_signals == 2 else signal.SIGKILL)

    def start(self) -> None:
        for child in self._all:
            child.start(time.monotonic())

    def wait_ready(self) -> bool:
        """Until the scheduler takes requests, for which an executor may load for long. False: a signal came before.

        Raises `Failed` when a process ends.
        """
        told = False
        while self._next_turn():
            for child in self._all:
                self._raise_if_ended(child)
            if not told and any(COMPILING in line for child in self._executors for line in list(child.tail)):
                told = True
                self._console.tell(f"{COMPILING} …")
            if self._is_ready():
                return True
        return False

    def _next_turn(self) -> bool:
        """False: a signal came."""
        if not self._num_signals:
            time.sleep(TURN_S)
        return not self._num_signals

    def _raise_if_ended(self, child: Child) -> None:
        if child.is_running or child.process is None:
            return
        status = child.process.returncode
        words = child.last_words()
        if words and words[0].startswith("error: "):
            raise Failed(2 if status == 2 else 1, *(f"{child.name}: {w.removeprefix('error: ')}" for w in words))
        if self._console.folder is not None:
            words = [*words, f"its log: {self._console.folder / child.name}.log"]
        else:
            words = []  # they stand on the console already
        raise Failed(1, f"{child.name} ended with {ending(status)}", *words)

    def _is_ready(self) -> bool:
        # Without executors of our own, those of others may come later.
        path = "/health/ready" if self._executors else "/health/live"
        return answers(self._url + path)

    def watch(self) -> None:
        """Start again whatever dies, until a signal comes."""
        while self._next_turn():
            for child in self._all:
                line = child.check(time.monotonic())
                if line:
                    self._console.tell(line)

    def stop(self) -> None:
        """The scheduler first, whose grace needs the executors; then those. Nothing is left running."""
        self._end([self._scheduler], self._grace_s + LEEWAY_S)
        self._end(self._executors, EXECUTORS_S)

    def _end(self, children: list[Child], timeout_s: float) -> None:
        for child in children:
            child.signal(signal.SIGTERM)
        deadline = time.monotonic() + timeout_s
        while any(child.is_running for child in children) and time.monotonic() < deadline:
            time.sleep(0.02)
        for child in children:
            if child.is_running:
                self._console.tell(f"{child.name}: does not end, is killed")
                child.signal(signal.SIGKILL)
            if child.process is not None:
                child.process.wait()
