"""The virtual executor: it mirrors its sequences by the plans alone, and knows what each iteration computes."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from common.wire import FinishCode, NewSequence, Plan, Result
from scheduler_svc.simulator.iteration import chunk_attention

Slots = NDArray[np.int64]


@dataclass(slots=True)
class Work:
    """One iteration, as the executor sees it."""

    decodes: Slots
    """Slots of the decode rows."""
    prefills: list[tuple[int, int, int]]
    """(slot, tokens computed before, chunk)."""
    sampled: Slots
    """Slots that get a token, in the order of the result."""
    finished: NDArray[np.bool_]
    """Which of them end with it."""
    prefill_tokens: int = 0
    decode_context: int = 0
    prefill_attention: int = 0
    swapped_blocks: int = 0
    entered: list[NewSequence] = field(default_factory=list)
    left: list[tuple[int, int]] = field(default_factory=list)
    """(slot, request) of the slots that were freed."""

    @property
    def num_rows(self) -> int:
        return len(self.decodes) + len(self.prefills)


class Replica:
    """Columns by slot. A request is known by the seed of its sampling parameters."""

    def __init__(self, epoch: int, num_slots: int, block_size: int, answers: Slots) -> None:
        """`answers`: for each request, after how many tokens it ends: by EOS where it would be allowed more."""
        self.epoch, self.block_size, self._answers = epoch, block_size, answers
        self.request = np.full(num_slots, -1, np.int64)
        self.length = np.zeros(num_slots, np.int64)
        """Known tokens."""
        self.computed = np.zeros(num_slots, np.int64)
        self.end = np.zeros(num_slots, np.int64)
        """Tokens at which a sequence ends."""
        self._by_limit = np.zeros(num_slots, bool)
        """Whether it ends there by its limit."""
        self.num_blocks = np.zeros(num_slots, np.int64)

    def take(self, plan: Plan) -> Work:
        """Apply a plan's changes and run its work."""
        left = self._free(plan)
        for new in plan.new:
            self._enter(new)
        if len(plan.appended_slots):
            np.add.at(self.num_blocks, plan.appended_slots.astype(np.int64), 1)
        decodes = plan.decodes.astype(np.int64)
        context = int(self.length[decodes].sum())
        prefills = list(self._prefills(plan))
        ends = [slot for slot, _, _ in prefills if self.computed[slot] == self.length[slot]]
        self.computed[decodes] += 1
        sampled = np.concatenate([decodes, np.array(ends, np.int64)]) if ends else decodes
        self.length[sampled] += 1
        return Work(
            decodes=decodes,
            prefills=prefills,
            sampled=sampled,
            finished=self.length[sampled] >= self.end[sampled],
            prefill_tokens=sum(chunk for _, _, chunk in prefills),
            decode_context=context,
            prefill_attention=sum(chunk_attention(computed, chunk) for _, computed, chunk in prefills),
            swapped_blocks=(len(plan.swap_outs) + len(plan.swap_ins)) // 2,
            entered=list(plan.new),
            left=left,
        )

    def _free(self, plan: Plan) -> list[tuple[int, int]]:
        left = []
        for slot in plan.freed.tolist():
            left.append((slot, int(self.request[slot])))
            self.request[slot] = -1
            self.num_blocks[slot] = self.length[slot] = self.computed[slot] = 0
        return left

    def _enter(self, new: NewSequence) -> None:
        slot = new.slot
        self.request[slot] = new.params.seed
        self.length[slot], self.computed[slot] = len(new.tokens), new.computed
        answer = min(int(self._answers[new.params.seed]), new.params.max_tokens)
        self.end[slot] = new.prompt_length + answer
        self._by_limit[slot] = answer == new.params.max_tokens
        self.num_blocks[slot] = len(new.blocks)

    def _prefills(self, plan: Plan) -> list[tuple[int, int, int]]:
        rows = []
        for slot, chunk in zip(plan.prefills.tolist(), plan.prefill_lengths.tolist(), strict=True):
            rows.append((slot, int(self.computed[slot]), chunk))
            self.computed[slot] += chunk
        return rows

    def result(self, plan: Plan, work: Work) -> Result:
        """The answer to a plan. Tokens are all 0: nobody reads them."""
        finish = np.full(len(work.sampled), int(FinishCode.CONTINUE), np.uint8)
        if work.finished.any():
            ended = self._by_limit[work.sampled[work.finished]]
            finish[work.finished] = np.where(ended, int(FinishCode.LENGTH), int(FinishCode.EOS))
        return Result(self.epoch, plan.iteration, np.zeros(len(work.sampled), np.int32), finish)
