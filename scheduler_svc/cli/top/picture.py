"""What is known of a server from the events of its live page."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

WINDOW_S = 60.0
"""Of latencies."""
RATE_S = 5.0
"""Of rates, and of the times of iterations."""
MAX_ROWS = 4096


class Moment(NamedTuple):
    """Counters and cumulative histograms, as they were told at a time."""

    at: float
    counters: dict[str, float]
    latency: dict[str, Any]


class Iteration(NamedTuple):
    """lane: its epoch. at: when it was told. tokens: decodes and prefilled ones."""

    lane: int
    at: float
    seconds: float
    tokens: int


@dataclass(slots=True)
class Picture:
    """`take` each event; the rest tells of the newest state. Times are those of `clock`, in seconds."""

    clock: Callable[[], float] = time.monotonic
    status: dict[str, Any] = field(default_factory=dict)
    """The newest, as `scheduler_svc.frontend.dashboard.viewer` renders it; empty before the first."""
    trouble: str = ""
    """Why nothing new comes; empty while it does."""
    _moments: deque[Moment] = field(default_factory=deque)
    _iterations: deque[Iteration] = field(default_factory=lambda: deque(maxlen=MAX_ROWS))

    def take(self, kind: str, data: dict[str, Any]) -> None:
        """One event."""
        now = self.clock()
        match kind:
            case "trouble":
                self.trouble = str(data["message"])
            case "status":
                self.status = data
                moment = Moment(now, data.get("counters", {}), data.get("latency", {}))
                # Beats come seldomer than looks at the queue: a rate over none of them would be zero.
                if not self._moments or moment[1:] != self._moments[-1][1:]:
                    self._moments.append(moment)
                while len(self._moments) > 2 and now - self._moments[1].at > WINDOW_S:
                    self._moments.popleft()
            case "rows":
                for row in data["rows"]:
                    tokens = len(row["d"]) + sum(row["pl"])
                    self._iterations.append(Iteration(row["lane"], now, row["ms"] / 1000, tokens))

    @property
    def has_rates(self) -> bool:
        """Whether there are two moments to compare."""
        return len(self._moments) > 1

    def rate(self, counter: str) -> float:
        """By how much a counter rose a second, lately; 0 where that is not known."""
        if not self.has_rates:
            return 0.0
        last = self._moments[-1]
        # While nothing happens no moment is noted: then the last rise is long ago.
        first = next((one for one in self._moments if last.at - one.at <= RATE_S), last)
        first = self._moments[-2] if first is last else first
        seconds = max(self.clock() - first.at if self.clock() - last.at > RATE_S else last.at - first.at, 1e-3)
        return max(0.0, (last.counters.get(counter, 0) - first.counters.get(counter, 0)) / seconds)

    def iteration(self, lane: int) -> tuple[float, float] | None:
        """Mean seconds and mean tokens of a lane's iterations of the last `RATE_S`; None where there were none."""
        oldest = self.clock() - RATE_S
        recent = [one for one in self._iterations if one.lane == lane and one.at >= oldest]
        if not recent:
            return None
        return sum(one.seconds for one in recent) / len(recent), sum(one.tokens for one in recent) / len(recent)

    def latency(self, kind: str, share: float) -> float | None:
        """A quantile of the last minute, in seconds; None where nothing was measured."""
        if not self._moments:
            return None
        now, before = self._moments[-1].latency.get(kind), self._moments[0].latency.get(kind)
        if now is None:
            return None
        counts = list(now["counts"])
        if before is not None and self.has_rates:
            counts = [new - old for new, old in zip(counts, before["counts"], strict=True)]
        return quantile(share, now["bounds"], counts)


def quantile(share: float, bounds: Sequence[float], cumulative: Sequence[float]) -> float | None:
    """Of a histogram, linear within a bucket, as Prometheus' `histogram_quantile` has it; None of an empty one.

    bounds: upper edges of the buckets but for the last, which has none. cumulative: one more than those.
    """
    total = cumulative[-1] if cumulative else 0
    if total <= 0:
        return None
    below, low = 0.0, 0.0
    for bound, count in zip(bounds, cumulative, strict=False):
        if count >= share * total:
            return low + (bound - low) * (share * total - below) / max(count - below, 1e-12)
        below, low = count, bound
    return bounds[-1]
