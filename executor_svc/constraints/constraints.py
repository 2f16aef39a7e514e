"""The constraints of a batch: which rows are bound, and what may be drawn for them in an iteration."""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.wire import FinishCode, ModelCard, Plan, SamplingParams
from executor_svc.batch import BatchState
from executor_svc.constraints.grammars import Grammars, yield_to_the_model
from executor_svc.constraints.row import Row, Step, Vocabulary, Words, words_of

Int64s = NDArray[np.int64]

IDLE_WAIT_S = 0.02
"""How long an iteration in which no row at all could draw waits for one that can."""


@dataclass(frozen=True, slots=True)
class Masks:
    """Of one iteration's sampled rows, numbered 0 … R-1."""

    rows: Int64s
    """[N] those whose tokens are bound."""
    words: Words
    """[N, ceil(V / 32)] bit i % 32 of word i // 32: token i may be drawn."""
    undrawn: Int64s
    """Rows that get no token."""
    codes: NDArray[np.uint8]
    """Their `FinishCode`s."""


class Constraints:
    """Follows the bound sequences of one batch state. Costs nothing where no sequence is bound."""

    def __init__(self, state: BatchState, card: ModelCard) -> None:
        self._state, self._grammars = state, Grammars(card)
        self._pool = ThreadPoolExecutor(2, "constraint", initializer=yield_to_the_model)
        self._vocabulary = Vocabulary(state.vocab_size, state.eos_ids)
        self._rows: dict[int, Row] = {}
        """By slot."""

    def clear(self) -> None:
        """Forget every sequence."""
        self._rows.clear()

    def take(self, plan: Plan) -> None:
        """Begin with a plan that the batch state has applied: its new grammars are compiled from now on."""
        if self._rows:
            for slot in plan.freed.tolist():
                self._rows.pop(slot, None)
        for new in plan.new:
            constraint = new.params.constraint
            if constraint.bounds:
                grammar = self._grammars.get(constraint) if constraint.language else None
                ends = self._ends(new.params)
                self._rows[new.slot] = Row(constraint, grammar, ends, self._vocabulary, self._pool)

    def unbound(self, slots: Int64s, rows: Int64s) -> Int64s:
        """Of these rows, whose slots `slots` tells, those that are not bound."""
        if not self._rows or not len(rows):
            return rows
        return np.array([row for row in rows.tolist() if int(slots[row]) not in self._rows], np.int64)

    def masks(self, slots: Int64s) -> Masks | None:
        """What may be drawn for the sampled rows of an iteration, `slots`; None: anything."""
        if not self._rows:
            return None
        bound = [(place, self._rows[slot]) for place, slot in enumerate(slots.tolist()) if slot in self._rows]
        if not bound:
            return None
        steps = self._steps(bound, slots)
        if len(bound) == len(slots) and all(step is Step.NOT_READY for step in steps):
            awaited: list[Future[Any]] = [row.waits_for for _, row in bound if row.waits_for is not None]
            wait(awaited, IDLE_WAIT_S, FIRST_COMPLETED)
            steps = self._steps(bound, slots)
        rows, words, undrawn, codes = [], [], [], []
        for (place, row), step in zip(bound, steps, strict=True):
            mask = self._mask(row, int(slots[place])) if step is Step.READY else None
            if mask is not None and mask.any():
                rows.append(place)
                words.append(mask)
            else:
                undrawn.append(place)
                codes.append(FinishCode.NOT_READY if step is Step.NOT_READY else FinishCode.STUCK)
        return Masks(
            rows=np.array(rows, np.int64),
            words=np.array(words, np.int32).reshape(len(rows), -(-self._state.vocab_size // 32)),
            undrawn=np.array(undrawn, np.int64),
            codes=np.array(codes, np.uint8),
        )

    def look_ahead(self, slots: Int64s) -> None:
        """Have the threads begin with what the tokens just drawn for these slots bring."""
        for slot in slots.tolist() if self._rows else ():
            row = self._rows.get(slot)
            if row is not None and row.is_slow:
                row.step(self._generated(slot))

    def _steps(self, bound: list[tuple[int, Row]], slots: Int64s) -> list[Step]:
        return [row.step(self._generated(int(slots[place]))) for place, row in bound]

    def _generated(self, slot: int) -> NDArray[np.int32]:
        state = self._state
        return state.tokens[slot, state.prompt_length[slot] : state.length[slot]]

    def _mask(self, row: Row, slot: int) -> Words:
        state = self._state
        return row.mask(self._generated(slot), young=bool(state.length[slot] < state.min_length[slot]))

    def _ends(self, params: SamplingParams) -> Words:
        ends = params.stop_token_ids if params.ignore_eos else np.append(params.stop_token_ids, self._state.eos_ids)
        return words_of(ends.astype(np.int64), self._state.vocab_size)
