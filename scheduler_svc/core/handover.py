"""Hand-over: the KV of a sequence goes from a lane that drains straight to another one, and need not be computed anew.

    a seat and blocks on the target, the source's blocks lent ─▶ fetched ─▶ it goes on there
                                                             └─▶ failed, aborted, or the target is lost ─▶ as ever

From its beginning on the sequence is seated on the target, where no plan touches it until its KV has come. The blocks
on both sides stay held (the fence) until the target has answered that it writes no more, or its epoch has ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

from common.wire import Fetch, Lend, Recall
from scheduler_svc.core.admission import Gate
from scheduler_svc.core.config import Batching, Handover, SchedulerConfig
from scheduler_svc.core.counters import Counters
from scheduler_svc.core.lane import Lane
from scheduler_svc.core.model_queue import ModelQueue
from scheduler_svc.core.sequence import Sequence, WaitReason

OVERHEAD_S = 0.005
"""What a hand-over takes beside its bytes: messages, and the wait for two loops."""
ASSUMED_BYTES_PER_S = 5e8
ASSUMED_PREFILL_S = 1e-4
"""Seconds of a prefill token while neither lane has measured it."""
AHEAD_S = 0.25
"""A lane begins no more hand-overs while those under way are likely to take so long: the others decode meanwhile."""
MIN_TIMEOUT_S = 2.0
TIMEOUT = 8.0
"""A hand-over may take so many times what was expected."""


class Course(Enum):
    """What is best for a sequence of a lane that drains."""

    MOVED = "moved"
    """Its KV is on the way."""
    LATER = "later"
    """It stays and decodes until it is its turn."""
    RECOMPUTE = "recompute"


@dataclass(slots=True, eq=False)
class Transit:
    """One sequence whose KV is on its way."""

    ticket: int
    sequence: Sequence
    source: Lane | None
    """None when its epoch has ended meanwhile."""
    target: Lane
    num_hit: int
    """Blocks of the target that held the beginning already."""
    num_moved: int
    """Blocks that are sent."""
    computed: int
    """Tokens that have KV when all is there."""
    expected_s: float
    block_bytes: int
    recalled: bool = False


class Handovers:
    """All hand-overs under way, and what was learned from those before."""

    def __init__(self, config: SchedulerConfig, counters: Counters) -> None:
        self._config, self._counters = config, counters
        self.under_way: dict[int, Transit] = {}
        """By ticket."""
        self.orders: list[Lend | Fetch | Recall] = []
        """What executors must be told, in this order. Secrets are not the core's: they are empty here."""
        self._last_ticket = 0
        self._byte_s = 1 / ASSUMED_BYTES_PER_S
        """Smoothed seconds of a byte."""

    # --- beginning ---

    def consider(self, sequence: Sequence, peers: list[Lane], queue: ModelQueue) -> Course:
        """Begin to hand over a resident sequence of an idle lane to one of its peers, where that is wanted."""
        source = sequence.lane
        assert source is not None and source.in_flight is None
        able = [peer for peer in peers if self._is_possible(source, peer, sequence)]
        if not able:
            return Course.RECOMPUTE
        if sum(t.expected_s for t in self.under_way.values() if t.source is source) >= AHEAD_S:
            return Course.LATER
        source.update_tokens(sequence)
        for target in sorted(able, key=lambda peer: peer.num_running):
            gate, hit = Gate(target, queue.lengths), target.prefix_hit(sequence)
            if gate.blocked_by(sequence, hit) is not WaitReason.NONE:
                continue
            if not self._is_worth(source, target, sequence, len(hit)):
                return Course.RECOMPUTE
            self._begin(source, target, sequence, hit, gate.predicted_length(sequence))
            if queue.share is not None:
                target.tenant[sequence.slot] = queue.share.index(sequence.tenant)
            return Course.MOVED
        return Course.RECOMPUTE

    def _is_possible(self, source: Lane, target: Lane, sequence: Sequence) -> bool:
        config, one, other = self._config, source.transfer, target.transfer
        if config.handover is Handover.NEVER or config.batching is Batching.REQUEST:
            return False
        if not one.address or not one.block_bytes or (one.layout, one.block_bytes) != (other.layout, other.block_bytes):
            return False
        if one.place and one.place != other.place:
            return False
        if source.model.fingerprint != target.model.fingerprint or source.block_size != target.block_size:
            return False
        # Blocks that are free but about to be swapped out must not be written.
        if target.changes.swap_outs or (target.in_flight is not None and target.in_flight.swaps_out):
            return False
        return not sequence.is_suspect and bool(source.computed[sequence.slot])

    def _is_worth(self, source: Lane, target: Lane, sequence: Sequence, num_hit: int) -> bool:
        """Whether there is KV to move, and that takes less time than to compute it."""
        computed, there = int(source.computed[sequence.slot]), num_hit * source.block_size
        if computed <= there:
            return False
        if self._config.handover is Handover.ALWAYS:
            return True
        token_s = target.pace.prefill_token_s or source.pace.prefill_token_s or ASSUMED_PREFILL_S
        return self._expected_s(source, source.num_blocks_for(computed) - num_hit) < token_s * (computed - there)

    def _expected_s(self, source: Lane, num_blocks: int) -> float:
        return OVERHEAD_S + num_blocks * source.transfer.block_bytes * self._byte_s

    def _begin(self, source: Lane, target: Lane, sequence: Sequence, hit: list[int], predicted_length: int) -> None:
        self._last_ticket += 1
        ticket, computed = self._last_ticket, int(source.computed[sequence.slot])
        used = slice(len(hit), source.num_blocks_for(computed))
        source.lent[ticket] = table = source.unseat(sequence)
        target.expect(sequence, hit, predicted_length)
        moved = table[used]
        transit = Transit(
            ticket=ticket,
            sequence=sequence,
            source=source,
            target=target,
            num_hit=len(hit),
            num_moved=len(moved),
            computed=computed,
            expected_s=self._expected_s(source, len(moved)),
            block_bytes=source.transfer.block_bytes,
        )
        self.under_way[ticket] = transit
        point, places = source.transfer, target.table(sequence.slot)[used]
        timeout_ms = int(1000 * min(3600.0, MIN_TIMEOUT_S + TIMEOUT * transit.expected_s))
        self.orders += [
            Lend(source.epoch, ticket, b"", np.array(moved, np.int32)),
            Fetch(target.epoch, ticket, b"", point.address, point.key, np.array(places, np.int32), timeout_ms),
        ]

    # --- end ---

    def end(self, target: Lane, ticket: int, *, done: bool, busy_s: float) -> Transit | None:
        """The target has answered: free the source's blocks. None for a ticket that it does not have."""
        transit = self.under_way.get(ticket)
        if transit is None or transit.target is not target:
            return None
        self._close(transit)
        if not done or transit.sequence.aborted:
            self._counters.handovers_failed += 1
            return transit
        self._counters.handovers_done += 1
        self._counters.handover_blocks += transit.num_moved
        if busy_s > 0:
            # Not more than fourfold at once: one stall says little of the next.
            each = min(busy_s / (transit.num_moved * transit.block_bytes), 4 * self._byte_s)
            self._byte_s += 0.2 * (each - self._byte_s)
        return transit

    def _close(self, transit: Transit) -> None:
        del self.under_way[transit.ticket]
        source = transit.source
        if source is not None:
            source.pool.release(source.lent.pop(transit.ticket), transit.sequence.retention)
            self.orders.append(Recall(source.epoch, transit.ticket))

    def give_up(self, sequence: Sequence) -> None:
        """An arriving sequence is wanted no more; its blocks stay held until the target answers."""
        self._recall(next(t for t in self.under_way.values() if t.sequence is sequence))

    def lose(self, lane: Lane) -> None:
        """A lane is gone. What it was to receive is over; what it lent may have come already: its target will say."""
        for transit in list(self.under_way.values()):
            if transit.target is lane:
                self._close(transit)
                self._counters.handovers_failed += 1
            elif transit.source is lane:
                transit.source = None
                self._recall(transit)

    def _recall(self, transit: Transit) -> None:
        if not transit.recalled:
            transit.recalled = True
            self.orders.append(Recall(transit.target.epoch, transit.ticket))

    def check_invariants(self, lanes: dict[int, Lane]) -> None:
        """Raise AssertionError unless lanes hold seats and blocks for these and for no others."""
        for lane in lanes.values():
            arriving = [t.sequence.slot for t in self.under_way.values() if t.target is lane]
            assert sorted(arriving) == sorted(lane.arriving), "a seat for no hand-over, or for two"
            assert lane.lent.keys() == {t.ticket for t in self.under_way.values() if t.source is lane}
        for transit in self.under_way.values():
            assert transit.sequence.lane is transit.target is lanes.get(transit.target.epoch)
            assert transit.source is None or transit.source is lanes.get(transit.source.epoch)
            assert transit.num_moved > 0 and transit.computed > transit.num_hit * transit.target.block_size
