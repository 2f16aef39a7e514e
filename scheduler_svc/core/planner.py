"""Builds the next iteration of a lane: decodes first, prefill chunks in the rest of one token budget.

Iteration-level scheduling follows Orca (OSDI'22), chunked prefill beside decodes Sarathi-Serve (OSDI'24).
"""

from __future__ import annotations

import numpy as np

from common.wire import Plan
from scheduler_svc.core.counters import Counters
from scheduler_svc.core.lane import Departure, InFlight, Lane, PlanChanges
from scheduler_svc.core.sequence import Sequence, State, WaitReason
from scheduler_svc.core.waiting_queue import ModelQueue

MAX_SET_ASIDE = 32
"""How many sequences that are too large for a lane it passes over, in one plan, to reach one that it can take."""


class Planner:
    """One plan for one lane. `peers` are the other lanes that take sequences from the same queue."""

    def __init__(self, lane: Lane, peers: list[Lane], queue: ModelQueue, counters: Counters, now: float) -> None:
        self.lane, self.peers, self.queue, self.counters, self.now = lane, peers, queue, counters, now
        self.chunks: dict[Sequence, int] = {}
        self.num_chunk_tokens = 0

    def build(self) -> Plan | None:
        """Decide the iteration, or None when there is nothing to run."""
        lane = self.lane
        assert lane.in_flight is None
        preempted = self._grow_decodes()
        shorts, longs = self._under_way()
        for sequence in shorts:
            self._take(sequence, self._left(longs))
        if preempted:
            self.queue.block(self.queue.head(), WaitReason.KV_BLOCKS)
        elif not lane.draining:
            self._admit_waiting(longs)
        for sequence in longs:
            self._take(sequence, self._left([]))
        lane.last_ticket = self.queue.last_ticket
        if not len(lane.decoding) and not self.chunks:
            return None
        return self._seal()

    def _seal(self) -> Plan:
        lane, changes = self.lane, self.lane.changes
        lane.iteration += 1
        prefills = list(self.chunks.items())
        num_tokens = len(lane.decoding) + self.num_chunk_tokens
        lane.in_flight = InFlight(lane.iteration, lane.decoding, prefills, self.now, num_tokens)
        lane.changes = PlanChanges()
        return Plan(
            epoch=lane.epoch,
            iteration=lane.iteration,
            decodes=lane.decoding,
            prefills=np.array([sequence.slot for sequence, _ in prefills], np.uint16),
            prefill_lengths=np.array([chunk for _, chunk in prefills], np.int32),
            new=tuple(changes.new),
            freed=np.array(changes.freed, np.uint16),
            appended_slots=np.array(changes.appended_slots, np.uint16),
            appended_blocks=np.array(changes.appended_blocks, np.int32),
        )

    # --- seated sequences ---

    def _grow_decodes(self) -> bool:
        """Give each decode that starts a block one more; preempt the last by key where the pool is exhausted.

        Returns whether any was preempted.
        """
        lane = self.lane
        slots = lane.decoding
        needy = slots[lane.computed[slots] >= lane.num_blocks[slots] * lane.block_size].tolist()
        short_of_blocks = len(needy) > lane.pool.num_available
        if short_of_blocks:
            needy.sort(key=lambda slot: self._occupant(slot).key)
        for slot in needy:
            sequence = lane.occupant[slot]
            while sequence is not None and sequence.slot == slot and not lane.pool.num_available:
                self._preempt(max(lane.running(), key=lambda candidate: candidate.key))
            if sequence is not None and sequence.slot == slot:
                lane.append_block(slot)
        return short_of_blocks

    def _occupant(self, slot: int) -> Sequence:
        sequence = self.lane.occupant[slot]
        assert sequence is not None
        return sequence

    def _under_way(self) -> tuple[list[Sequence], list[Sequence]]:
        """(short, long) prefills that have begun, each by key."""
        under_way = sorted(self.lane.prefilling, key=lambda sequence: sequence.key)
        return [s for s in under_way if not s.is_long], [s for s in under_way if s.is_long]

    def _left(self, longs: list[Sequence]) -> int:
        """Tokens that short prefills may still take. The first long one is sure of half of what decodes leave.

        So neither waits for more than the other's current work.
        """
        lane = self.lane
        budget = lane.token_budget - len(lane.decoding)
        kept = min(self._chunk(longs[0]), budget - budget // 2) if longs else 0
        return budget - kept - self.num_chunk_tokens

    def _chunk(self, sequence: Sequence) -> int:
        """The most that one iteration may compute of a sequence."""
        remaining = int(self.lane.length[sequence.slot] - self.lane.computed[sequence.slot])
        cap = self.lane.config.max_prefill_chunk
        return min(remaining, cap) if cap else remaining

    def _take(self, sequence: Sequence, left: int) -> None:
        """Plan the next chunk of a sequence."""
        chunk = min(self._chunk(sequence), left)
        if chunk > 0:
            self.chunks[sequence] = chunk
            self.num_chunk_tokens += chunk

    # --- admission ---

    def _admit_waiting(self, longs: list[Sequence]) -> None:
        """Seat waiting sequences by key, as long as there are seats, tokens and blocks.

        One long prefill runs at a time, but for one of a higher class; short ones pass those that wait.
        """
        lane, queue = self.lane, self.queue
        aside: list[Sequence] = []
        queue.block(None, WaitReason.NONE)
        while True:
            head = queue.head(long_above=longs[0].priority if longs else None)
            if head is None:
                break
            if not lane.could_hold(head) and len(aside) < MAX_SET_ASIDE:
                queue.remove(head)
                aside.append(head)
                continue
            blocked_by = WaitReason.TOKEN_BUDGET if self._left(longs) <= 0 else self._admit(head)
            if blocked_by is not WaitReason.NONE:
                queue.block(head, blocked_by)
                break
            longs[:] = [s for s in longs if s.lane is lane]
            if head.is_long:
                longs.insert(0, head)
            else:
                self._take(head, self._left(longs))
        for sequence in aside:
            queue.put_back(sequence)

    def _admit(self, sequence: Sequence) -> WaitReason:
        """Seat the head of the queue, by preempting a lower class where that is enough. Returns what forbids it."""
        lane = self.lane
        if self._better_elsewhere(sequence):
            return WaitReason.POLICY
        if sequence.is_suspect and any(other.is_suspect for other in lane.running()):
            return WaitReason.POLICY
        hit = lane.prefix_hit(sequence)
        blocked_by = lane.blocked_by(sequence, hit)
        if blocked_by is not WaitReason.NONE:
            victims = self._lower_class_victims(sequence, hit)
            if not victims or self._left_to_peer(sequence, self.peers):
                return blocked_by
            for victim in victims:
                self._preempt(victim)
            hit = lane.prefix_hit(sequence)
        self.queue.remove(sequence)
        lane.admit(sequence, hit)
        self._count_admission(sequence, len(hit) * lane.block_size)
        return WaitReason.NONE

    def _better_elsewhere(self, sequence: Sequence) -> bool:
        """Whether this lane has its even share of running and waiting sequences, and a peer with room has not."""
        if not self.peers:
            return False
        total = len(self.queue) + self.lane.num_running + sum(peer.num_running for peer in self.peers)
        share = -(-total // (1 + len(self.peers)))
        if self.lane.num_running < share:
            return False
        return self._left_to_peer(sequence, [peer for peer in self.peers if peer.num_running < share])

    def _left_to_peer(self, sequence: Sequence, peers: list[Lane]) -> bool:
        """Leave a sequence to a peer that has room, but only once: what waited at this lane's last plan is taken.

        So balance never costs more than one iteration, even where the peer hangs.
        """
        if sequence.ticket <= self.lane.last_ticket:
            return False
        return any(peer.blocked_by(sequence, []) is WaitReason.NONE for peer in peers)

    def _lower_class_victims(self, sequence: Sequence, hit: list[int]) -> list[Sequence]:
        """The fewest sequences of lower classes, last first, that must go to seat this one; none when not enough."""
        lane = self.lane
        candidates = [other for other in lane.running() if other.priority > sequence.priority]
        candidates.sort(key=lambda other: other.key, reverse=True)
        shared, freed_blocks, decoding = set(hit), 0, 0
        for count, victim in enumerate(candidates, start=1):
            # The hit's own blocks free no room: they are needed again at once.
            freed_blocks += lane.pool.num_releasable(b for b in lane.table(victim.slot) if b not in shared)
            decoding += not victim.prefilling
            without = Departure(count, decoding, freed_blocks)
            if lane.blocked_by(sequence, hit, without) is WaitReason.NONE:
                return candidates[:count]
        return []

    def _preempt(self, victim: Sequence) -> None:
        """Back to the queue with its tokens, to be recomputed later."""
        self.num_chunk_tokens -= self.chunks.pop(victim, 0)
        self.lane.release(victim)
        victim.state = State.WAITING
        victim.num_preemptions += 1
        self.counters.preemptions += 1
        self.queue.add(victim)

    def _count_admission(self, sequence: Sequence, cached: int) -> None:
        if sequence.admitted < 0:
            sequence.admitted = self.now
            sequence.cached_tokens = cached
            self.counters.queue_time.observe(self.now - sequence.arrived)
            self.counters.prefix_queries += sequence.prompt_length
            self.counters.prefix_hits += cached
