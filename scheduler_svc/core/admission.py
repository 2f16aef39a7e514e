"""Whether a waiting sequence may be seated on a lane now: seats, blocks, and what those who run will still need."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.config import Admission, Preemption
from scheduler_svc.core.lane import Lane
from scheduler_svc.core.prediction import OutputLengths
from scheduler_svc.core.sequence import Sequence, WaitReason

RECHECK = 8
"""A predicted peak that was too high for the head is looked for again when somebody has left, and every so many
iterations: it costs as much as all else in a plan, and falls slowly."""


class Gate:
    """Admission to one lane at one moment."""

    def __init__(self, lane: Lane, lengths: OutputLengths) -> None:
        self._lane, self._lengths = lane, lengths
        never = lane.config.preemption is Preemption.NONE
        self._admission = Admission.WORST_CASE if never else lane.config.admission
        self._reserve: float | None = None
        """Blocks that those seated will ever need beyond what they hold, were none to end before all others; None: not
        counted yet."""

    def predicted_length(self, sequence: Sequence) -> int:
        """Tokens that a waiting sequence will have when it ends; at least one more than now."""
        generated = len(sequence.tokens) - sequence.prompt_length
        if self._admission is Admission.WORST_CASE:
            return sequence.max_length
        predicted = self._lengths.predict(sequence.tenant, generated, sequence.params.max_tokens)
        return sequence.prompt_length + max(predicted, generated + 1)

    def admitted(self, predicted_length: int, num_tokens: int) -> None:
        """A sequence for which there was room was seated."""
        if self._reserve is not None:
            self._reserve += self._need(predicted_length, self._lane.num_blocks_for(num_tokens))

    def preempted(self) -> None:
        """Others gave way."""
        self._reserve = None

    def blocked_by(self, sequence: Sequence, hit: list[int], without: Collection[Sequence] = ()) -> WaitReason:
        """What forbids to seat a sequence that could start from these cached blocks, were others not there."""
        lane = self._lane
        if not lane.could_hold(sequence):
            return WaitReason.POLICY
        if not len(lane.free_slots) + len(without):
            return WaitReason.SEATS
        fits = self._fits_paged(sequence, hit, without) if lane.is_paged else self._fits_in_a_run(sequence, without)
        return WaitReason.NONE if fits else WaitReason.KV_BLOCKS

    def _fits_in_a_run(self, sequence: Sequence, without: Collection[Sequence]) -> bool:
        """Whether there is a run of blocks for all that it may become."""
        lane = self._lane
        released = [block for other in without for block in lane.table(other.slot)]
        return lane.pool.fits(lane.num_blocks_at_admission(sequence), released)

    def _fits_paged(self, sequence: Sequence, hit: list[int], without: Collection[Sequence]) -> bool:
        """Its first own decode must find a block, so must those of other prefills, a running decode may soon need one
        each, and the peak must fit."""
        lane = self._lane
        available = lane.pool.num_available - lane.pool.num_evictable(hit)
        if without:
            # The hit's own blocks free no room: they are needed again at once.
            shared = set(hit)
            available += sum(
                lane.pool.num_releasable(b for b in lane.table(s.slot) if b not in shared) for s in without
            )
        num_others = lane.num_running - len(without)
        length = min(len(sequence.tokens) + 1, sequence.max_length - 1)
        spare = available + len(hit) - lane.num_blocks_for(length)
        soon = len(lane.decoding) - sum(not s.prefilling for s in without)
        if spare < max(soon, lane.watermark_blocks if num_others else 0):
            return False
        if spare < soon + len(lane.prefilling) and spare < soon + self._num_first_blocks(without):
            return False
        if not num_others or self._admission is Admission.IMMEDIATE:
            return True
        return self._later_need_fits(sequence, hit, without, available)

    def _num_first_blocks(self, without: Collection[Sequence]) -> int:
        """Blocks that the prefills under way do not hold yet, and will need for their first decodes."""
        lane = self._lane
        slots = [sequence.slot for sequence in lane.prefilling if sequence not in without]
        lengths = np.minimum(lane.length[slots] + 1, lane.max_length[slots] - 1)
        return int((lengths > lane.num_blocks[slots] * lane.block_size).sum())

    def _later_need_fits(
        self, sequence: Sequence, hit: list[int], without: Collection[Sequence], available: int
    ) -> bool:
        """Whether what will be needed at once, beyond what the others hold now, is available.

        The peak is looked for only where the sum of all needs does not fit; that is counted once a plan.
        """
        predicted = self.predicted_length(sequence)
        reserve = self._reserve
        if reserve is None or without:
            reserve = self._reserve_of(self._others(without))
        if not without:
            self._reserve = reserve
        if reserve + self._need(predicted, len(hit)) <= available:
            return True
        if self._admission is Admission.WORST_CASE:
            return False
        state = (sequence.ticket, self._lane.num_departures, self._lane.iteration // RECHECK)
        if not without and self._lane.peak_too_high == state:
            return False
        fits = self._peak_fits(len(sequence.tokens), predicted, hit, self._others(without), available)
        if not fits and not without:
            self._lane.peak_too_high = state
        return fits

    def _peak_fits(
        self, num_tokens: int, predicted: int, hit: list[int], slots: NDArray[np.int64], available: int
    ) -> bool:
        """Whether the predicted peak of those at these slots and of a newcomer fits."""
        lane = self._lane
        lengths = np.append(lane.length[slots], num_tokens)
        remaining = np.append(self._remaining(slots), predicted - num_tokens)
        held = np.append(lane.num_blocks[slots], len(hit))
        return peak_blocks(lengths, remaining, held, lane.block_size) - int(held.sum()) <= available

    def _need(self, predicted_length: int, num_held: int) -> float:
        """Blocks that a sequence will need till its end, beyond those it holds; its last token needs no KV.

        Where lengths are guesses, no fewer than `peak_blocks` counts.
        """
        final = predicted_length - 1
        if self._admission is Admission.WORST_CASE:
            return max(0, self._lane.num_blocks_for(final) - num_held)
        return max(0.0, final / self._lane.block_size + 0.5 - num_held)

    def _reserve_of(self, slots: NDArray[np.int64]) -> float:
        """The same for all of these together."""
        lane = self._lane
        finals = lane.length[slots] + self._remaining(slots) - 1
        if self._admission is Admission.WORST_CASE:
            return float(np.maximum(-(-finals // lane.block_size) - lane.num_blocks[slots], 0).sum())
        return float(np.maximum(finals / lane.block_size + 0.5 - lane.num_blocks[slots], 0).sum())

    def _others(self, without: Collection[Sequence]) -> NDArray[np.int64]:
        """Slots of those that run on."""
        seated = self._lane.is_seated
        if without:
            seated = seated.copy()
            seated[[sequence.slot for sequence in without]] = False
        return np.flatnonzero(seated)

    def _remaining(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens that those at these slots will still generate; who has outlived the guess gets half as many again."""
        lane = self._lane
        length = lane.length[slots].astype(np.int64)
        most = lane.max_length[slots] - length
        if self._admission is Admission.WORST_CASE:
            return most
        guess = lane.predicted_length[slots] - length
        generated = length - lane.prompt_length[slots]
        likely: NDArray[np.int64] = np.minimum(np.where(guess > 0, guess, generated // 2 + 1), most)
        return likely


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
