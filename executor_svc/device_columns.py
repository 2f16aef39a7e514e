"""The device's copy of the batch state: what a plan changes in it, as patches of single words."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from common.wire import Plan
from executor_svc.batch import BatchState
from kernels import SamplingColumns
from kernels.batch_inputs import SlotColumns

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]


class DeviceColumns:
    """Block tables, last tokens and sampling parameters by slot, in one tensor whose address never changes.

    There is one slot more than sequences: padding rows read it, and nobody writes to it.
    """

    def __init__(self, state: BatchState, device: torch.device) -> None:
        self._state = state
        self.padding_slot = state.limits.max_num_seqs
        slots, width = self.padding_slot + 1, state.max_blocks
        self._seed, self._tables = 0, 2 * slots  # seeds first: they are of 8 bytes
        self._last_token = self._tables + slots * width
        self._temperature, self._top_k, self._top_p, self._min_p = (
            self._last_token + number * slots for number in (1, 2, 3, 4)
        )
        size = self._min_p + slots
        if size > np.iinfo(np.int32).max:
            raise ValueError(f"max-num-seqs {slots - 1} times {width} blocks is more than the device columns can hold")
        words = torch.zeros(size + size % 2, dtype=torch.int32, device=device)

        def column(start: int, dtype: torch.dtype) -> torch.Tensor:
            return words[start : start + slots].view(dtype)

        self.slots = SlotColumns(
            words=words,
            block_tables=words[self._tables : self._last_token].view(slots, width),
            last_token=column(self._last_token, torch.int32),
            sampling=SamplingColumns(
                temperature=column(self._temperature, torch.float32),
                top_k=column(self._top_k, torch.int32),
                top_p=column(self._top_p, torch.float32),
                min_p=column(self._min_p, torch.float32),
                seed=words[: 2 * slots].view(torch.int64),
                position=torch.zeros(slots, dtype=torch.int64, device=device),
            ),
        )

    @property
    def max_patches(self) -> int:
        """Most patches of one plan: every slot gets a new sequence with a whole table."""
        return self.padding_slot * (self._state.max_blocks + 7)

    def patches(self, plan: Plan) -> Int32s:
        """int32 [N, 2], (word, value) pairs, of a plan that the batch state has applied. No word comes twice."""
        if not len(plan.new) and not len(plan.appended_slots):
            return np.empty((0, 2), np.int32)
        slots, places, blocks = self._state.appended_places(plan)
        width = self._state.max_blocks
        words, values = [self._tables + slots * width + places], [blocks]
        for new in plan.new:
            words.append(self._tables + new.slot * width + np.arange(len(new.blocks)))
            values.append(new.blocks)
        new_slots = np.array([new.slot for new in plan.new], np.int64)
        if len(new_slots):
            words += self._places(new_slots)
            values += self._values(new_slots, np.array([new.tokens[-1] for new in plan.new], np.int32))
        return np.stack((np.concatenate(words).astype(np.int32), np.concatenate(values).astype(np.int32)), 1)

    def _places(self, slots: Int64s) -> list[Int64s]:
        """Words of the scalars of these slots; the same order as `_values`."""
        starts = (self._last_token, self._temperature, self._top_k, self._top_p, self._min_p)
        return [*(start + slots for start in starts), (2 * slots[:, None] + np.arange(2)).ravel()]

    def _values(self, slots: Int64s, last_tokens: Int32s) -> list[Int32s]:
        state = self._state
        columns = (state.temperature, state.top_k, state.top_p, state.min_p, state.seed)
        return [last_tokens, *(column[slots].view(np.int32) for column in columns)]
