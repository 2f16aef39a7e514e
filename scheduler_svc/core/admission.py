"""Whether a waiting sequence may be seated on a lane now: seats, blocks, and what those who run will still need."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.config import Admission, Preemption
from scheduler_svc.core.lane import Lane
from scheduler_svc.core.prediction import OutputLengths
from scheduler_svc.core.sequence import Sequence, WaitReason


class Gate:
    """Admission to one lane at one moment."""

    def __init__(self, lane: Lane, lengths: OutputLengths) -> None:
        self._lane, self._lengths = lane, lengths
        never = lane.config.preemption is Preemption.NONE
        self._admission = Admission.WORST_CASE if never else lane.config.admission

    def predicted_length(self, sequence: Sequence) -> int:
        """Tokens that a waiting sequence will have when it ends; at least one more than now."""
        generated = len(sequence.tokens) - sequence.prompt_length
        if self._admission is Admission.WORST_CASE:
            return sequence.max_length
        predicted = self._lengths.predict(sequence.tenant, generated, sequence.params.max_tokens)
        return sequence.prompt_length + max(predicted, generated + 1)

    def blocked_by(self, sequence: Sequence, hit: list[int], without: Collection[Sequence] = ()) -> WaitReason:
        """What forbids to seat a sequence that could start from these cached blocks, were others not there."""
        lane = self._lane
        if not lane.could_hold(sequence):
            return WaitReason.POLICY
        if not len(lane.free_slots) + len(without):
            return WaitReason.SEATS
        fits = self._fits_paged(sequence, hit, without) if lane.is_paged else self._fits_in_a_run(sequence)
        return WaitReason.NONE if fits else WaitReason.KV_BLOCKS

    def _fits_in_a_run(self, sequence: Sequence) -> bool:
        """Preempting others promises no run, so it is not counted on."""
        return self._lane.pool.fits(self._lane.num_blocks_at_admission(sequence))

    def _fits_paged(self, sequence: Sequence, hit: list[int], without: Collection[Sequence]) -> bool:
        """Its first own decode must find a block, a running decode may soon need one each, and the peak must fit."""
        lane = self._lane
        # The hit's own blocks free no room: they are needed again at once.
        shared = set(hit)
        freed = sum(lane.pool.num_releasable(b for b in lane.table(s.slot) if b not in shared) for s in without)
        available = lane.pool.num_available - lane.pool.num_evictable(hit) + freed
        slots = self._others(without)
        headroom = 0
        if len(slots):
            headroom = max(lane.watermark_blocks, len(lane.decoding) - sum(not s.prefilling for s in without))
        length = min(len(sequence.tokens) + 1, sequence.max_length - 1)
        if lane.num_blocks_for(length) - len(hit) + headroom > available:
            return False
        if not len(slots) or self._admission is Admission.IMMEDIATE:
            return True
        return self._later_need(sequence, hit, slots) <= available

    def _others(self, without: Collection[Sequence]) -> NDArray[np.int64]:
        """Slots of those that run on."""
        gone = {sequence.slot for sequence in without}
        return np.array([s.slot for s in self._lane.occupant if s is not None and s.slot not in gone], np.int64)

    def _later_need(self, sequence: Sequence, hit: list[int], slots: NDArray[np.int64]) -> int:
        """Blocks that will be needed at once, at most, beyond those that the others hold now."""
        lane = self._lane
        final = min(self.predicted_length(sequence), sequence.max_length) - 1
        lengths = np.append(lane.length[slots], len(sequence.tokens))
        remaining = np.append(self._remaining(slots), max(1, final + 1 - len(sequence.tokens)))
        held = np.append(lane.num_blocks[slots], len(hit))
        if self._admission is Admission.WORST_CASE:
            finals = lengths + remaining - 1
            return int((-(-finals // lane.block_size) - held).sum())
        return peak_blocks(lengths, remaining, held, lane.block_size) - int(held.sum())

    def _remaining(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens that those at these slots will still generate; who has outlived the guess gets half as many again."""
        lane = self._lane
        length = lane.length[slots].astype(np.int64)
        most = lane.max_length[slots].astype(np.int64) - length
        if self._admission is Admission.WORST_CASE:
            return most
        guess = lane.predicted_length[slots] - length
        generated = np.array([length[i] - self._prompt_length(slot) for i, slot in enumerate(slots.tolist())])
        likely: NDArray[np.int64] = np.minimum(np.where(guess > 0, guess, generated // 2 + 1), most)
        return likely

    def _prompt_length(self, slot: int) -> int:
        occupant = self._lane.occupant[slot]
        assert occupant is not None
        return occupant.prompt_length


def peak_blocks(
    lengths: NDArray[np.int64], remaining: NDArray[np.int64], held: NDArray[np.int64], block_size: int
) -> int:
    """The most blocks that these sequences hold at once, if each gets a token an iteration until it ends.

    It is reached just before one of them ends; with the i-th to end there are those that end no earlier (the look-ahead
    of Past-Future, ASPLOS'25). Blocks are rounded up by half of one for each sequence, what is rounded on average.
    """
    order = np.argsort(-remaining, kind="stable")
    left = remaining[order]
    staying = np.arange(1, len(order) + 1)
    tokens = np.cumsum(lengths[order]) + staying * (left - 1)
    # A sequence never gives blocks back before it ends.
    at_least = np.cumsum(held[order])
    return int(np.maximum(tokens / block_size + staying / 2, at_least).max())
