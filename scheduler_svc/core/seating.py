"""Seats waiting sequences on a lane: who is next, whether another lane is the better place, and who must give way."""

from __future__ import annotations

from collections.abc import Callable

from scheduler_svc.core.admission import Gate
from scheduler_svc.core.lane import Lane
from scheduler_svc.core.model_queue import ModelQueue
from scheduler_svc.core.sequence import Sequence, WaitReason

WINDOW = 32
"""Sequences that a lane leaves to others, in one plan; it takes the next one itself."""
MAX_BARRED = 256
"""Sequences that a lane must not take and passes over, in one plan; behind more of them the queue stands."""
MIN_PATIENCE_S = 0.02
PATIENCE = 4.0
"""A sequence is left to a lane that is the better place for so many of that lane's mean iterations, no longer."""


class Seating:
    """One lane's view of the queue at one plan. `peers` are the other lanes that take sequences from it."""

    def __init__(self, lane: Lane, peers: list[Lane], queue: ModelQueue, now: float) -> None:
        self._lane, self._peers, self._queue, self._now = lane, peers, queue, now
        self._gate = Gate(lane, queue.lengths)

    def is_barred(self, sequence: Sequence) -> bool:
        """Whether this lane must not take a sequence now: it is too large, or one could be blamed for another."""
        lane = self._lane
        if not lane.could_hold(sequence):
            return True
        return sequence.is_struck and any(sequence.must_not_run_beside(other) for other in lane.running())

    def is_left_to_a_peer(self, sequence: Sequence) -> bool:
        """Whether another lane is the better place for it, and takes it soon."""
        return any(self._is_left_to(peer, sequence) for peer in self._peers)

    def admit(self, sequence: Sequence, preempt: Callable[[Sequence], None]) -> WaitReason:
        """Seat the head of the queue, by preempting lower ranks where that is enough. Returns what forbids it."""
        lane = self._lane
        if not lane.free_slots and not self._may_preempt_for(sequence):
            return WaitReason.SEATS
        hit = lane.prefix_hit(sequence)
        blocked_by = self._gate.blocked_by(sequence, hit)
        if blocked_by is not WaitReason.NONE:
            victims = self._lower_rank_victims(sequence, hit)
            if not victims or any(self._takes_soon(peer, sequence) for peer in self._peers):
                return blocked_by
            for victim in victims:
                preempt(victim)
            self._gate.preempted()
            hit = lane.prefix_hit(sequence)
        predicted_length = self._gate.predicted_length(sequence)
        self._queue.remove(sequence, self._now)
        lane.admit(sequence, hit, predicted_length)
        self._gate.admitted(predicted_length, len(sequence.tokens))
        return WaitReason.NONE

    # --- several lanes ---

    def _is_left_to(self, peer: Lane, sequence: Sequence) -> bool:
        """Whether a peer should have a sequence: it holds more of the prefix, or less than its even share of all that
        run and wait while this lane has that; and it will take it soon.

        A longer prefix outweighs an imbalance of up to an eighth of the seats.
        """
        lane = self._lane
        more = _blocks_at_hand(peer, sequence) - _blocks_at_hand(lane, sequence)
        slack = max(1, lane.seats // 8) if more else 0
        total = self._queue.num_within + lane.num_running + sum(other.num_running for other in self._peers)
        share = -(-total // (1 + len(self._peers)))
        if more > 0:
            better = peer.num_running < share + slack
        else:
            better = lane.num_running >= share + slack and peer.num_running < share
        return better and self._takes_soon(peer, sequence)

    def _takes_soon(self, peer: Lane, sequence: Sequence) -> bool:
        """Whether a peer has room for a sequence, has not seen it yet, and plans again before long.

        So balance costs an iteration of the peer at most, and little even where the peer hangs.
        """
        if sequence.ticket <= peer.last_ticket or not peer.could_hold(sequence):
            return False
        if peer.in_flight is not None:
            patience = max(MIN_PATIENCE_S, PATIENCE * peer.pace.mean_s)
            if self._now - max(peer.in_flight.planned_at, sequence.arrived) > patience:
                return False
        return Gate(peer, self._queue.lengths).blocked_by(sequence, []) is WaitReason.NONE

    # --- preemption by rank ---

    def _may_preempt_for(self, sequence: Sequence) -> bool:
        """Whether anybody has a lower rank."""
        lane = self._lane
        return lane.may_preempt and bool((lane.rank[lane.is_seated] > sequence.rank).any())

    def _lower_rank_victims(self, sequence: Sequence, hit: list[int]) -> list[Sequence]:
        """The fewest sequences of lower ranks, last first, that must go to seat this one; none when not enough."""
        lane = self._lane
        if not self._may_preempt_for(sequence):
            return []
        candidates = [s for s in lane.resident() if s.rank > sequence.rank and lane.changes.is_told(s.slot)]
        candidates.sort(key=lambda other: other.key, reverse=True)
        low, high = 1, len(candidates) + 1
        while low < high:
            middle = (low + high) // 2
            if self._gate.blocked_by(sequence, hit, candidates[:middle]) is WaitReason.NONE:
                high = middle
            else:
                low = middle + 1
        return candidates[:low] if low <= len(candidates) else []


def _blocks_at_hand(lane: Lane, sequence: Sequence) -> int:
    """Blocks of a waiting sequence's KV that a lane holds: cached ones, or those that were swapped out."""
    hit = len(lane.prefix_hit(sequence))
    swapped = sequence.swapped
    return max(hit, len(swapped.blocks)) if swapped is not None and swapped.lane is lane else hit
