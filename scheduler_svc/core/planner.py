"""Builds the next iteration of a lane: decodes first, prefill chunks in the rest of one token budget.

Iteration-level scheduling follows Orca (OSDI'22), chunked prefill beside decodes Sarathi-Serve (OSDI'24).
"""

from __future__ import annotations

import numpy as np

from common.wire import Plan
from scheduler_svc.core.counters import Counters
from scheduler_svc.core.lane import InFlight, Lane, PlanChanges
from scheduler_svc.core.sequence import Sequence, State, WaitReason
from scheduler_svc.core.waiting_queue import ModelQueue


class Planner:
    """One plan for one lane. Holds nothing between plans."""

    def __init__(self, lane: Lane, queue: ModelQueue, counters: Counters, now: float) -> None:
        self.lane, self.queue, self.counters, self.now = lane, queue, counters, now
        self.chunks: dict[Sequence, int] = {}
        self.preempted = False

    def build(self, *, may_admit: bool) -> Plan | None:
        """Decide the iteration, or None when there is nothing to run."""
        lane = self.lane
        assert lane.in_flight is None
        self._grow_decodes()
        self._fill_prefills(lane.token_budget - len(lane.decoding), may_admit=may_admit)
        if not len(lane.decoding) and not self.chunks:
            return None
        return self._seal()

    def _seal(self) -> Plan:
        lane, changes = self.lane, self.lane.changes
        lane.iteration += 1
        prefills = list(self.chunks.items())
        num_tokens = len(lane.decoding) + sum(self.chunks.values())
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

    def _grow_decodes(self) -> None:
        """Give each decode that starts a block one more; preempt the last by key where the pool is exhausted."""
        lane = self.lane
        slots = lane.decoding
        needy = slots[lane.computed[slots] >= lane.num_blocks[slots] * lane.block_size].tolist()
        if len(needy) > lane.pool.num_available:
            needy.sort(key=lambda slot: self._occupant(slot).key)
        for slot in needy:
            sequence = lane.occupant[slot]
            while sequence is not None and sequence.slot == slot and not lane.pool.num_available:
                self._preempt(max(lane.running(), key=lambda candidate: candidate.key))
            if sequence is not None and sequence.slot == slot:
                lane.append_block(slot)

    def _occupant(self, slot: int) -> Sequence:
        sequence = self.lane.occupant[slot]
        assert sequence is not None
        return sequence

    def _fill_prefills(self, budget: int, *, may_admit: bool) -> None:
        """Spend the budget on prefill chunks of seated and newly admitted sequences.

        One long prefill runs at a time, and is sure of half the budget; short ones, also later ones, share the other
        half and what it leaves. So neither waits for more than the other's current work.
        """
        lane = self.lane
        under_way = sorted(lane.prefilling, key=lambda sequence: sequence.key)
        long = next((sequence for sequence in under_way if sequence.is_long), None)
        left, reserved = self._reserve(long, budget)
        for sequence in under_way:
            if sequence is not long:
                left -= self._take(sequence, left)
        while may_admit and not self.preempted:
            head = self.queue.head(allow_long=long is None)
            if head is None:
                self.queue.blocked_by = WaitReason.POLICY
                break
            if left <= 0:
                self.queue.blocked_by = WaitReason.TOKEN_BUDGET
                break
            blocked_by = self._admit(head)
            if blocked_by is not WaitReason.NONE:
                self.queue.blocked_by = blocked_by
                break
            left = budget - reserved - sum(self.chunks.values())
            if head.is_long:
                long = head
                left, reserved = self._reserve(long, left)
            else:
                left -= self._take(head, left)
        if long is not None and long.lane is lane:
            self._take(long, budget - sum(self.chunks.values()))

    def _reserve(self, long: Sequence | None, budget: int) -> tuple[int, int]:
        """(what is left for short prefills, what is kept for the long one)."""
        if long is None:
            return budget, 0
        reserved = min(self._remaining(long), budget - budget // 2)
        return budget - reserved, reserved

    def _remaining(self, sequence: Sequence) -> int:
        return int(self.lane.length[sequence.slot] - self.lane.computed[sequence.slot])

    def _take(self, sequence: Sequence, left: int) -> int:
        """Plan the next chunk of a sequence; returns its length."""
        cap = self.lane.config.max_prefill_chunk or left
        chunk = min(self._remaining(sequence), left, cap)
        if chunk > 0:
            self.chunks[sequence] = chunk
        return max(chunk, 0)

    def _admit(self, sequence: Sequence) -> WaitReason:
        """Seat the head of the queue, by preempting a lower class where that is enough. Returns what forbids it."""
        lane = self.lane
        if (sequence.max_length - 1) > lane.limits.num_blocks * lane.block_size:
            return WaitReason.POLICY
        hit = lane.prefix_hit(sequence)
        blocked_by = self._blocked_by(sequence, hit, lane.num_running, len(lane.decoding), len(lane.free_slots), 0)
        if blocked_by is not WaitReason.NONE:
            victims = self._lower_class_victims(sequence, hit)
            if not victims:
                return blocked_by
            for victim in victims:
                self._preempt(victim)
            self.preempted = False
            hit = lane.prefix_hit(sequence)
        self.queue.remove(sequence)
        lane.admit(sequence, hit)
        self._count_admission(sequence, len(hit) * lane.block_size)
        return WaitReason.NONE

    def _blocked_by(
        self, sequence: Sequence, hit: list[int], running: int, decoding: int, free_slots: int, freed_blocks: int
    ) -> WaitReason:
        """Whether it could be seated now. A running decode may soon need one block each, so that many stay free."""
        if not free_slots:
            return WaitReason.SEATS
        pool = self.lane.pool
        available = pool.num_available - pool.num_evictable(hit) + freed_blocks
        headroom = max(self.lane.watermark_blocks, decoding) if running else 0
        needed = -(-len(sequence.tokens) // self.lane.block_size) - len(hit)
        return WaitReason.KV_BLOCKS if needed + headroom > available else WaitReason.NONE

    def _lower_class_victims(self, sequence: Sequence, hit: list[int]) -> list[Sequence]:
        """The fewest sequences of lower classes, last first, that must go to seat this one; none when not enough."""
        lane = self.lane
        candidates = [other for other in lane.running() if other.priority > sequence.priority]
        candidates.sort(key=lambda other: other.key, reverse=True)
        freed_blocks, decoding = 0, len(lane.decoding)
        for count, victim in enumerate(candidates, start=1):
            freed_blocks += lane.pool.num_releasable(lane.table(victim.slot))
            decoding -= not victim.prefilling
            running, free_slots = lane.num_running - count, len(lane.free_slots) + count
            if self._blocked_by(sequence, hit, running, decoding, free_slots, freed_blocks) is WaitReason.NONE:
                return candidates[:count]
        return []

    def _preempt(self, victim: Sequence) -> None:
        """Back to the queue with its tokens, to be recomputed later."""
        self.preempted = True
        self.chunks.pop(victim, None)
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
