"""How many sequences a batch may have in flight, by what the core last told of itself."""

from __future__ import annotations

from common.wire import Stats

SEATS = "gilir_seats"


class IdleSeats:
    """Seats that nobody else has or waits for. The core preempts batch lines too; this keeps it from having to."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._seen: Stats | None = None
        self._free = 0

    def room(self, stats: Stats | None, own: int) -> int:
        """Sequences that may be in flight in all. `own`: how many are now.

        The figures are up to a beat old (a quarter of a second); what is ours is told apart when they are first seen.
        """
        if stats is None or stats.stopping or not stats.ready:
            return 0
        if stats is not self._seen:
            self._seen = stats
            seats = sum(value for key, value in stats.gauges.items() if key.partition("{")[0] == SEATS)
            live = stats.gauges.get("gilir_live_sequences", 0)
            waiting = stats.gauges.get("vllm:num_requests_waiting", 0)
            # More wait than are ours: others do, for seats or for KV.
            self._free = 0 if waiting > own else int(seats - max(0, live - own))
        return max(0, min(self._most, self._free))
