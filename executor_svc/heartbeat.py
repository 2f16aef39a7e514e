"""Heartbeat of one attachment: goes on while the main thread computes, and notices a scheduler that is gone."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from enum import Enum

import zmq

from common.waker import Waker
from common.wire import Alive, WireError, decode, encode
from executor_svc.sockets import Dialing


class Pulse(Enum):
    FINE = "fine"
    LOST = "lost"
    """No echo for the whole timeout."""
    UNKNOWN = "unknown"
    """The scheduler answers, but does not know this epoch."""


class Heartbeat:
    """A daemon thread with a socket of its own that sends `Alive` and listens for the echo.

    `tell` is called from the thread, once, when `pulse` turns from FINE; the thread ends then.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        dialing: Dialing,
        epoch: int,
        interval_s: float,
        tell: Callable[[], None],
    ) -> None:
        self.epoch = epoch
        self.pulse = Pulse.FINE
        self._dialing, self._interval_s, self._tell = dialing, interval_s, tell
        self._stopping = False
        self._waker = Waker()
        self._thread = threading.Thread(target=self._run, args=(context,), name=f"heartbeat-{epoch}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread and wait for it."""
        self._stopping = True
        self._waker.wake()
        self._thread.join()
        self._waker.close()

    def _run(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        dealer = self._dialing.open(context)
        try:
            self._beat(dealer)
        finally:
            dealer.close(linger=0)
        if self.pulse is not Pulse.FINE:
            self._tell()

    def _beat(self, dealer: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(dealer, zmq.POLLIN)
        poller.register(self._waker, zmq.POLLIN)
        message = encode(Alive(epoch=self.epoch))
        heard_at = time.monotonic()
        due = heard_at
        while not self._stopping:
            if time.monotonic() >= due:
                with contextlib.suppress(zmq.Again):
                    dealer.send(message, zmq.DONTWAIT)
                due = time.monotonic() + self._interval_s
            began = time.monotonic()
            patience_ms = max(0, int((min(due, heard_at + self._dialing.timeout_s) - began) * 1000) + 1)
            poller.poll(patience_ms)
            # What this process stood still beyond that is no silence of the scheduler.
            heard_at += max(0.0, time.monotonic() - began - patience_ms / 1000)
            for echo in self._echoes(dealer):
                if echo == self.epoch:
                    heard_at = time.monotonic()
                elif echo == 0:
                    self.pulse = Pulse.UNKNOWN
                    return
            if time.monotonic() - heard_at > self._dialing.timeout_s:
                self.pulse = Pulse.LOST
                return

    @staticmethod
    def _echoes(dealer: zmq.Socket[bytes]) -> list[int]:
        """Epochs of the echoes that have come; anything else is passed over."""
        epochs = []
        with contextlib.suppress(zmq.Again):
            while True:
                frames = dealer.recv_multipart(zmq.DONTWAIT)
                with contextlib.suppress(WireError):
                    echo = decode(frames[0])
                    if len(frames) == 1 and isinstance(echo, Alive):
                        epochs.append(echo.epoch)
        return epochs
