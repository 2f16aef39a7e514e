"""Which tokens a sequence has had, for the penalties: kept up with one token a step, whatever the length."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from executor_svc.batch import BatchState

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Occurrences:
    """Sparse list, one entry per (row, token) that occurred."""

    rows: Int64s
    token_ids: Int64s
    counts: NDArray[np.int32]
    """Occurrences in the output."""
    in_prompt: NDArray[np.bool_]


class SeenTokens:
    """Distinct tokens of each slot in order of discovery. All of it is derived from the state's token matrix."""

    def __init__(self, state: BatchState) -> None:
        self._state = state
        slots, width = state.limits.max_num_seqs, state.max_model_len + 1
        # Committed as it is touched: only slots with penalties cost memory.
        self._place = np.zeros((slots, state.vocab_size), np.int32)
        """Where in the lists a token stands, from 1; 0: not seen."""
        self._token_ids = np.zeros((slots, width), np.int32)
        self._counts = np.zeros((slots, width), np.int32)
        self._in_prompt = np.zeros((slots, width), bool)
        self._num = np.zeros(slots, np.int64)
        self._length = np.zeros(slots, np.int32)
        """Tokens taken in."""
        self._generation = np.full(slots, -1, np.int64)

    def clear(self) -> None:
        """The state was cleared: generations start anew."""
        self._generation[:] = -1

    def occurrences(self, rows: Int64s, slots: Int64s) -> Occurrences:
        """What `slots` have had, as entries of `rows`."""
        self._catch_up(slots)
        counts = self._num[slots]
        slot = np.repeat(slots, counts)
        place = np.arange(len(slot)) - np.repeat(np.cumsum(counts) - counts, counts)
        return Occurrences(
            rows=np.repeat(rows, counts),
            token_ids=self._token_ids[slot, place].astype(np.int64),
            counts=self._counts[slot, place],
            in_prompt=self._in_prompt[slot, place],
        )

    def _catch_up(self, slots: Int64s) -> None:
        columns = self._state.columns
        behind = columns.length[slots] - self._length[slots]
        same = columns.generation[slots] == self._generation[slots]
        for slot in slots[~same | (behind < 0) | (behind > 1)].tolist():
            self._rebuild(slot)
        self._take_in(slots[same & (behind == 1)])

    def _take_in(self, slots: Int64s) -> None:
        """One more output token of each of these slots."""
        self._length[slots] += 1
        tokens = self._state.tokens[slots, self._length[slots] - 1]
        place = self._place[slots, tokens]
        unseen = place == 0
        fresh = slots[unseen]
        self._num[fresh] += 1
        place[unseen] = self._num[fresh]
        self._place[fresh, tokens[unseen]] = place[unseen]
        self._token_ids[fresh, place[unseen] - 1] = tokens[unseen]
        self._counts[fresh, place[unseen] - 1] = 0
        self._in_prompt[fresh, place[unseen] - 1] = False
        self._counts[slots, place - 1] += 1

    def _rebuild(self, slot: int) -> None:
        state = self._state
        self._place[slot, self._token_ids[slot, : self._num[slot]]] = 0
        length, prompt_length = int(state.length[slot]), int(state.prompt_length[slot])
        tokens = state.tokens[slot, :length]
        distinct, place = np.unique(tokens, return_inverse=True)
        count = len(distinct)
        self._token_ids[slot, :count] = distinct
        self._counts[slot, :count] = np.bincount(place[prompt_length:], minlength=count)
        self._in_prompt[slot, :count] = np.bincount(place[:prompt_length], minlength=count) > 0
        self._place[slot, distinct] = np.arange(1, count + 1)
        self._num[slot], self._length[slot] = count, length
        self._generation[slot] = state.columns.generation[slot]
