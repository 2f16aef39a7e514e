"""What API keys use: their calls at a time, and their tokens by the minute.

A token bucket for each key (Turner, "New directions in communications", 1986): it holds what a minute allows, is full
at first, and fills evenly. A call takes its prompts' tokens when it is accepted, and each generated token as it comes.
What is generated may leave the bucket in debt, so over time a key gets exactly its rate. A call whose prompts are
larger than the bucket needs a full one.

It is counted here, and not in the frontends, because only the core knows the calls of all of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from common.wire import Ended, EndReason, KeyLimits, Submit
from scheduler_svc.core.sequence import Sequence

MIN_SWEEP = 64
"""Rows below which none is given up."""
MAX_WAIT_S = 1 << 30
ROUNDING = 1e-6
"""Tokens by which a bucket that is full enough may seem not to be."""
NO_ROW = 0
"""Row of the sequences of which nothing is counted."""


class KeyUsage:
    """A row for each key that has a limit, from 1 on. A row that has no call and a full bucket may be given up."""

    def __init__(self) -> None:
        self._row_of: dict[str, int] = {}
        self._free: list[int] = []
        self._calls: dict[int, dict[tuple[int, int], int]] = {}
        """By row: (frontend, call) -> its live sequences."""
        self._rate = np.zeros(16)
        """Tokens a second; 0: they are not limited."""
        self._balance = np.zeros(16)
        self._settled_at = np.zeros(16)
        """Up to when the bucket has been filled."""
        self._sweep_at = MIN_SWEEP

    def refusal(self, owner: int, requests: tuple[Submit, ...], now: float) -> Ended | None:
        """The answer to a call with which its key would go over a limit."""
        limits = requests[0].limits
        row = self._row_of.get(limits.key)
        if row is None:
            return None
        calls = self._calls[row]
        if limits.max_concurrent and (owner, limits.call) not in calls and len(calls) >= limits.max_concurrent:
            text = f"this API key may have {limits.max_concurrent} requests at a time"
            return Ended(0, EndReason.OVER_LIMIT, message=text, retry_after_s=1)
        self._adopt_rate(row, limits, now)
        num_tokens = sum(len(request.prompt) for request in requests)
        need = min(float(num_tokens), 60 * float(self._rate[row]))
        missing = need - float(self._balance[row])
        if limits.tokens_per_minute and missing > ROUNDING:
            text = f"this API key may use {limits.tokens_per_minute} tokens a minute"
            wait = min(MAX_WAIT_S, max(1, math.ceil(missing / float(self._rate[row]))))
            return Ended(0, EndReason.OVER_LIMIT, message=text, retry_after_s=wait)
        return None

    def begin(self, owner: int, request: Submit, now: float) -> int:
        """A request was accepted. Returns its key's row, for its sequences."""
        limits = request.limits
        if not limits.key:
            return NO_ROW
        row = self._row_of.get(limits.key)
        if row is None:
            row = self._open(limits.key, now)
        self._adopt_rate(row, limits, now)
        if self._rate[row]:
            self._balance[row] -= len(request.prompt)
        calls, call = self._calls[row], (owner, limits.call)
        calls[call] = calls.get(call, 0) + request.n
        return row

    def end(self, sequence: Sequence) -> None:
        """A sequence has ended; its call has when it was the last one."""
        if sequence.key_row == NO_ROW:
            return
        calls, call = self._calls[sequence.key_row], (sequence.owner, sequence.call)
        calls[call] -= 1
        if not calls[call]:
            del calls[call]

    def charge_generated(self, rows: NDArray[np.int32], now: float) -> None:
        """One generated token each for these rows."""
        if not self._row_of or not len(rows):
            return
        counts = np.bincount(rows)
        charged = np.flatnonzero((counts > 0) & (self._rate[: len(counts)] > 0))
        self._settle(charged, now)
        self._balance[charged] -= counts[charged]

    def _settle(self, rows: NDArray[np.int64], now: float) -> None:
        """Fill the buckets of these rows up to now."""
        rate = self._rate[rows]
        filled = self._balance[rows] + rate * np.maximum(0.0, now - self._settled_at[rows])
        self._balance[rows] = np.minimum(filled, 60 * rate)
        self._settled_at[rows] = np.maximum(now, self._settled_at[rows])

    def _adopt_rate(self, row: int, limits: KeyLimits, now: float) -> None:
        """Fill a bucket up to now; an operator may have changed its size meanwhile."""
        self._settle(np.array([row]), now)
        rate = limits.tokens_per_minute / 60
        if rate != self._rate[row]:
            was_limited = bool(self._rate[row])
            self._rate[row] = rate
            self._balance[row] = min(float(self._balance[row]), 60 * rate) if was_limited else 60 * rate

    def _open(self, key: str, now: float) -> int:
        if len(self._row_of) >= self._sweep_at:
            self._sweep(now)
        row = self._free.pop() if self._free else len(self._row_of) + 1
        if row == len(self._rate):
            self._rate, self._balance, self._settled_at = (
                np.concatenate([column, np.zeros(row)]) for column in (self._rate, self._balance, self._settled_at)
            )
        self._row_of[key], self._calls[row] = row, {}
        self._rate[row], self._balance[row], self._settled_at[row] = 0.0, 0.0, now
        return row

    def _sweep(self, now: float) -> None:
        """Give up the rows that tell nothing: a new one would be the same."""
        self._settle(np.array(list(self._row_of.values())), now)
        for key, row in list(self._row_of.items()):
            if not self._calls[row] and self._balance[row] >= 60 * self._rate[row]:
                self._rate[row] = 0.0
                self._free.append(row)
                del self._row_of[key], self._calls[row]
        self._sweep_at = max(MIN_SWEEP, 2 * len(self._row_of))

    def check_invariants(self, live: Iterable[Sequence]) -> None:
        """Raise AssertionError unless the calls are those of the live sequences."""
        counted = Counter((s.key_row, s.owner, s.call) for s in live if s.key_row != NO_ROW)
        known = {(row, *call): count for row, calls in self._calls.items() for call, count in calls.items()}
        assert counted == known, "calls of API keys"
        assert self._calls.keys() == set(self._row_of.values())
