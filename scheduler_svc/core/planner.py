"""Builds the next iteration of a lane: decodes first, prefill chunks in the rest of one token budget.

Iteration-level scheduling follows Orca (OSDI'22), chunked prefill beside decodes Sarathi-Serve (OSDI'24).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from common.wire import Plan
from scheduler_svc.core.config import Batching, Preemption, Prefill
from scheduler_svc.core.counters import Counters
from scheduler_svc.core.iteration import InFlight, PlanChanges
from scheduler_svc.core.lane import Lane
from scheduler_svc.core.model_queue import ModelQueue
from scheduler_svc.core.seating import MAX_BARRED, WINDOW, Seating
from scheduler_svc.core.sequence import Sequence, State, WaitReason

NOBODY = np.empty(0, np.int64)
MAX_PREFILLS_IN_A_ROW = 16
"""Where phases are separate: prefills whose answers end at once take no lasting seat, and could go on for ever."""


class Planner:
    """One plan for one lane."""

    def __init__(self, lane: Lane, queue: ModelQueue, seating: Seating, counters: Counters, now: float) -> None:
        self.lane, self.queue, self.seating, self.counters, self.now = lane, queue, seating, counters, now
        self.config = lane.config
        self.chunks: dict[Sequence, int] = {}
        self.num_chunk_tokens = 0
        self.prefill_budget = lane.token_budget
        """Tokens of this iteration that prefill may take."""

    def build(self) -> Plan | None:
        """Decide the iteration, or None when there is nothing to run."""
        lane = self.lane
        assert lane.in_flight is None
        self.queue.refresh(self.now)
        if self.config.prefill is Prefill.SEPARATE:
            decodes = NOBODY
            prefills_first = lane.num_prefills_in_a_row < MAX_PREFILLS_IN_A_ROW or not len(lane.decoding)
            if prefills_first:
                self._plan_prefills(may_admit=True)
            elif lane.admits:
                self.queue.all_blocked(WaitReason.POLICY, self.now)
            lane.num_prefills_in_a_row = lane.num_prefills_in_a_row + 1 if self.chunks else 0
            if not self.chunks:
                if self._grow_decodes() and lane.admits:
                    self.queue.blocked(self.queue.head(), WaitReason.KV_BLOCKS, [], self.now)
                decodes = lane.decoding
                if not len(decodes) and not prefills_first:
                    # It was their turn, and they all gave way to the prefills under way.
                    self._plan_prefills(may_admit=False)
        else:
            preempted = self._grow_decodes()
            self.prefill_budget = self._prefill_beside(len(lane.decoding))
            self._plan_prefills(may_admit=not preempted)
            decodes = lane.decoding
        lane.last_ticket = self.queue.last_ticket
        if not len(decodes) and not self.chunks:
            return None
        return self._seal(decodes)

    def _prefill_beside(self, num_decodes: int) -> int:
        """Prefill tokens that may ride along with so many decodes."""
        if self.config.prefill is Prefill.SEPARATE:
            return self.lane.token_budget
        left = self.lane.token_budget - num_decodes
        if not self.config.target_itl_ms or not num_decodes or left <= 0:
            return left
        return self.lane.pace.prefill_tokens(num_decodes, left, self.config.target_itl_ms / 1000)

    def _seal(self, decodes: NDArray[np.int64]) -> Plan:
        lane, changes = self.lane, self.lane.changes
        lane.iteration += 1
        prefills = list(self.chunks.items())
        num_tokens = len(decodes) + self.num_chunk_tokens
        swaps_out = bool(changes.swap_outs)
        lane.in_flight = InFlight(lane.iteration, decodes, prefills, self.now, num_tokens, swaps_out)
        lane.changes = PlanChanges()
        lane.host.settle()
        self.counters.swapped_out_blocks += len(changes.swap_outs)
        self.counters.swapped_in_blocks += len(changes.swap_ins)
        lane.batch_is_closed = self.config.batching is Batching.REQUEST
        return Plan(
            epoch=lane.epoch,
            iteration=lane.iteration,
            decodes=decodes.astype(np.uint16),
            prefills=np.array([s.slot for s, _ in prefills], np.uint16),
            prefill_lengths=np.array([chunk for _, chunk in prefills], np.int32),
            new=tuple(changes.new),
            freed=np.array(changes.freed, np.uint16),
            appended_slots=np.array(changes.appended_slots, np.uint16),
            appended_blocks=np.array(changes.appended_blocks, np.int32),
            swap_outs=np.array(changes.swap_outs, np.int32).reshape(-1),
            swap_ins=np.array(changes.swap_ins, np.int32).reshape(-1),
        )

    # --- decodes ---

    def _grow_decodes(self) -> bool:
        """Give each decode that starts a block one more; preempt the last by key where the pool is exhausted.

        Returns whether any was preempted.
        """
        lane = self.lane
        slots = lane.decoding
        needy = slots[lane.computed[slots] >= lane.num_blocks[slots] * lane.block_size]
        if len(needy) <= lane.pool.num_available:
            if len(needy):
                lane.append_blocks(needy)
            return False
        last_first = sorted(lane.resident(), key=lambda sequence: sequence.key)
        while len(needy) > lane.pool.num_available:
            victim = last_first.pop()
            needy = needy[needy != victim.slot]
            self.preempt(victim)
        lane.append_blocks(needy)
        return True

    def preempt(self, victim: Sequence) -> None:
        """Back to the queue with its tokens, to be resumed later."""
        lane = self.lane
        assert lane.may_preempt, "no room for a running sequence, and none may give way"
        self.num_chunk_tokens -= self.chunks.pop(victim, 0)
        if self.config.preemption is Preemption.SWAP:
            lane.swap_out(victim)
        lane.release(victim, State.WAITING)
        self.prefill_budget = self._prefill_beside(len(lane.decoding))
        victim.num_preemptions += 1
        self.queue.counters.preemptions += 1
        self.queue.add(victim, self.now)

    # --- prefills ---

    def _plan_prefills(self, *, may_admit: bool) -> None:
        """Chunks for prefills under way, short ones first, then new ones; one long one beside them."""
        lane = self.lane
        under_way = sorted(lane.prefilling, key=lambda sequence: sequence.key)
        longs = [sequence for sequence in under_way if sequence.is_long]
        for sequence in under_way:
            if not sequence.is_long:
                self._take(sequence, self._left(longs))
        if not lane.admits:
            pass
        elif not may_admit:
            self.queue.blocked(self.queue.head(), WaitReason.KV_BLOCKS, [], self.now)
        elif self.config.batching is Batching.REQUEST and lane.batch_is_closed and lane.num_running:
            self.queue.all_blocked(WaitReason.POLICY, self.now)
        else:
            self._admit_waiting(longs)
        for sequence in longs:
            self._take(sequence, self._left([]))

    def _left(self, longs: list[Sequence]) -> int:
        """Tokens that short prefills may still take. The first long one is sure of half of what decodes leave.

        So neither waits for more than the other's current work.
        """
        budget = self.prefill_budget
        kept = min(self._remaining(longs[0]), budget - budget // 2) if longs else 0
        return budget - kept - self.num_chunk_tokens

    def _remaining(self, sequence: Sequence) -> int:
        """The most that one iteration may compute of a sequence."""
        remaining = int(self.lane.length[sequence.slot] - self.lane.computed[sequence.slot])
        cap = self.config.max_prefill_chunk
        return min(remaining, cap) if cap else remaining

    def _take(self, sequence: Sequence, left: int) -> None:
        """Plan the next chunk of a sequence. Without chunked prefill one that does not fit waits until it is first."""
        wanted = self._remaining(sequence)
        if wanted > left and not self.config.chunked_prefill and self.chunks:
            return
        chunk = min(wanted, left)
        if chunk > 0:
            self.chunks[sequence] = chunk
            self.num_chunk_tokens += chunk

    def _admit_waiting(self, longs: list[Sequence]) -> None:
        """Seat waiting sequences by key, as long as there are seats, tokens and blocks.

        One long prefill runs at a time, but for one of a higher rank; short ones pass those that wait. A batch that is
        held until its last member ends is not bounded by the tokens of its first iteration.
        """
        lane, queue = self.lane, self.queue
        whole_batch = self.config.batching is Batching.REQUEST
        aside: list[Sequence] = []
        num_barred, reason = 0, WaitReason.NONE
        while True:
            head = queue.head(long_above=longs[0].rank if longs and not whole_batch else None)
            if head is None:
                break
            is_barred = self.seating.is_barred(head)
            if is_barred and num_barred == MAX_BARRED:
                reason = WaitReason.POLICY
                break
            num_left = len(aside) - num_barred
            if is_barred or (num_left < WINDOW and self.seating.is_left_to_a_peer(head)):
                num_barred += is_barred
                queue.set_aside(head)
                aside.append(head)
                continue
            reason = WaitReason.TOKEN_BUDGET
            if whole_batch or self._left(longs) > 0:
                reason = self.seating.admit(head, self.preempt)
            if reason is not WaitReason.NONE:
                break
            self._note_admission(head)
            longs[:] = [sequence for sequence in longs if sequence.lane is lane]
            if head.is_long:
                longs.insert(0, head)
            else:
                self._take(head, self._left(longs))
        for sequence in aside:
            queue.put_back(sequence)
        queue.blocked(head, reason, aside, self.now)

    def _note_admission(self, sequence: Sequence) -> None:
        lane, share = self.lane, self.queue.share
        computed = int(lane.computed[sequence.slot])
        self.counters.recomputed_tokens += max(0, sequence.num_reached - computed)
        if share is not None:
            lane.tenant[sequence.slot] = share.index(sequence.tenant)
        if sequence.admitted < 0:
            sequence.admitted = self.now
            sequence.cached_tokens = computed
            counters = self.queue.counters
            counters.queue_time.observe(self.now - sequence.arrived)
            counters.prefix_queries += sequence.prompt_length
            counters.prefix_hits += computed
            if share is not None:
                share.charge_prompt(sequence.tenant, len(sequence.tokens) - computed)
