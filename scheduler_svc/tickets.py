"""The secrets of hand-overs, and until when executors must answer: what the pure core knows nothing of."""

from __future__ import annotations

import os
from dataclasses import replace

from common.wire import Fetch, Fetched, Lend, Recall
from common.wire.handover import SECRET_BYTES


class Tickets:
    """Those whose `Fetch` has been sent and whose answer has not come."""

    def __init__(self, *, answer_within_s: float) -> None:
        """An executor that computes answers when it has done so: that may take this long."""
        self._answer_within_s = answer_within_s
        self._secrets: dict[int, bytes] = {}
        """By ticket, from `Lend` to `Fetch`."""
        self._deadlines: dict[int, dict[int, float]] = {}
        """By epoch of the target, then ticket."""

    def open(self, order: Lend | Fetch | Recall, now: float) -> Lend | Fetch | Recall:
        """The order as it is sent: a ticket's two sides get one secret."""
        if isinstance(order, Recall):
            self._secrets.pop(order.ticket, None)
            return order
        if isinstance(order, Lend):
            self._secrets[order.ticket] = os.urandom(SECRET_BYTES)
            return replace(order, secret=self._secrets[order.ticket])
        waiting = self._deadlines.setdefault(order.epoch, {})
        # A target sees to one after the other.
        begins = max(waiting.values(), default=now + self._answer_within_s)
        waiting[order.ticket] = begins + order.timeout_ms / 1000
        secret = self._secrets.pop(order.ticket, b"") or os.urandom(SECRET_BYTES)
        return replace(order, secret=secret)

    def close(self, answer: Fetched) -> bool:
        """An answer has come. Returns whether it was awaited."""
        return self._deadlines.get(answer.epoch, {}).pop(answer.ticket, None) is not None

    def is_overdue(self, epoch: int, now: float) -> bool:
        """Whether an executor owes an answer for too long."""
        return any(now > deadline for deadline in self._deadlines.get(epoch, {}).values())

    def excuse(self, stalled_s: float) -> None:
        """Nobody could be heard for so long: what is owed is due so much later."""
        for waiting in self._deadlines.values():
            for ticket in waiting:
                waiting[ticket] += stalled_s

    def forget(self, epoch: int) -> None:
        """An epoch has ended."""
        self._deadlines.pop(epoch, None)
