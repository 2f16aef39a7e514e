"""From raw logits to tokens and logprobs, every row by its own parameters.

The order, as in vLLM: logprobs are read off the raw logits; then logit bias, penalties, the masks of min_tokens and
those of constraints change them; then temperature, top-k, top-p and min-p, and the draw. The draw is keyed by (seed,
position of the token in its sequence), so it does not depend on the batch, nor on when or where the row runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from common.wire import LogprobColumns, PromptLogprobs
from executor_svc.batch import BatchState, Work
from executor_svc.constraints import Constraints
from executor_svc.seen_tokens import SeenTokens
from executor_svc.transfer import Transfer
from kernels import SamplingColumns, apply_penalties, mask_tokens, sample, token_logprobs

SCORED_ROWS = 64
"""Prompt rows scored at a time: the log-softmax of more would take much memory with a large vocabulary."""

Int64s = NDArray[np.int64]


class NonFiniteError(Exception):
    """Some rows' logits are not numbers that can be sampled from."""

    def __init__(self, slots: Int64s) -> None:
        super().__init__("logits that are not finite")
        self.slots = slots


@dataclass(frozen=True, slots=True)
class Sampled:
    tokens: Int64s
    """[R]"""
    logprobs: LogprobColumns
    undrawn: NDArray[np.uint8] | None = None
    """[R] the `FinishCode` of a row that got no token, 0 for the others; None: all got one."""


@dataclass(frozen=True, slots=True)
class Drawing:
    """Draws that the device may still be busy with."""

    slots: Int64s
    """[R]"""
    tokens: torch.Tensor
    """int64 [R] on the device, also of rows whose logits are not finite."""
    scored: Int64s
    """Rows whose logprobs are wanted."""
    counts: NDArray[np.int32]
    """Alternatives that each of them wants."""
    undrawn: NDArray[np.uint8] | None
    """As in `Sampled`."""
    fetched: Callable[[], list[NDArray[Any]]]
    """Tokens, -1 where the logits are not finite; and, where rows are scored, ids and values of their entries."""


class Sampler:
    """Samples for one batch state. Touches Python objects only for rows with a logit bias or a constraint."""

    def __init__(self, state: BatchState, device: torch.device, constraints: Constraints) -> None:
        self._state = state
        self._transfer = Transfer(device)
        self._tensor = self._transfer.send
        self._seen = SeenTokens(state)
        self._constraints = constraints

    def clear(self) -> None:
        """Forget every sequence."""
        self._seen.clear()
        self._constraints.clear()

    def draw(self, logits: torch.Tensor, work: Work, columns: SamplingColumns) -> Drawing:
        """Queue the draws on the device, and the copy of the tokens back; waits for neither.

        logits: fp32 [R, V], overwritten. columns: of the R rows, on the device.
        """
        state, slots = self._state, work.sample_slots
        masks = self._constraints.masks(slots)
        undrawn = None
        counts = state.logprobs[slots]
        if masks is not None and len(masks.undrawn):
            undrawn = np.zeros(len(slots), np.uint8)
            undrawn[masks.undrawn] = masks.codes
            counts = np.where(undrawn, -1, counts)
        scored = np.flatnonzero(counts >= 0)
        counts = counts[scored]
        raw = logits[places := self._tensor(scored)] if len(scored) else None
        finite = torch.isfinite(logits.amax(-1))
        self._add_bias(logits, slots)
        self._penalise(logits, slots)
        self._mask_ends(logits, slots)
        if masks is not None and len(masks.rows):
            mask_tokens(logits, self._tensor(masks.rows), self._tensor(masks.words))
        drawn = sample(logits, columns, filtered=bool(state.has_filter[slots].any()))
        if masks is not None and undrawn is not None:
            # The last token that such a row has is its next input once more.
            last = state.tokens[slots[masks.undrawn], state.length[slots[masks.undrawn]] - 1].astype(np.int64)
            drawn.index_copy_(0, self._tensor(masks.undrawn), self._tensor(last))
        entries = () if raw is None else _entries(raw, drawn[places], counts)
        fetched = self._transfer.fetch(torch.where(finite, drawn, -1), *entries)
        return Drawing(slots, drawn, scored, counts, undrawn, fetched)

    def collect(self, drawing: Drawing) -> Sampled:
        """Wait for the draws. Raises `NonFiniteError`."""
        tokens, *entries = drawing.fetched()
        if (tokens < 0).any():
            raise NonFiniteError(drawing.slots[tokens < 0])
        if not entries:
            return Sampled(tokens, LogprobColumns(), drawing.undrawn)
        token_ids, values = _laid_end_to_end(drawing.counts, *entries)
        widths = (drawing.counts + 1).astype(np.uint16)
        logprobs = LogprobColumns(drawing.scored.astype(np.uint16), widths, token_ids, values)
        return Sampled(tokens, logprobs, drawing.undrawn)

    def _add_bias(self, logits: torch.Tensor, slots: Int64s) -> None:
        biased = np.flatnonzero(self._state.has_bias[slots])
        if not len(biased):
            return
        params = [self._state.params[slot] for slot in slots[biased].tolist()]
        present = [item for item in params if item is not None]
        rows = np.repeat(biased, [len(item.bias_ids) for item in present])
        tokens = np.concatenate([item.bias_ids for item in present]).astype(np.int64)
        values = np.concatenate([item.bias_values for item in present]).astype(np.float32)
        logits.index_put_((self._tensor(rows), self._tensor(tokens)), self._tensor(values), accumulate=True)

    def _penalise(self, logits: torch.Tensor, slots: Int64s) -> None:
        state = self._state
        rows = np.flatnonzero(state.has_penalty[slots])
        if not len(rows):
            return
        found = self._seen.occurrences(rows, slots[rows])
        apply_penalties(
            logits,
            self._tensor(found.rows),
            self._tensor(found.token_ids),
            self._tensor(found.counts),
            self._tensor(found.in_prompt),
            self._tensor(state.repetition[slots]),
            self._tensor(state.presence[slots]),
            self._tensor(state.frequency[slots]),
        )

    def _mask_ends(self, logits: torch.Tensor, slots: Int64s) -> None:
        """Before `min_tokens` are there, neither EOS (unless it is ignored anyway) nor a stop token may be drawn.

        Bound rows see to it themselves: what their constraint allows may be nothing else.
        """
        state = self._state
        young = self._constraints.unbound(slots, np.flatnonzero(state.length[slots] < state.min_length[slots]))
        if not len(young):
            return
        with_eos = young[~state.ignore_eos[slots[young]]]
        rows = [np.repeat(with_eos, len(state.eos_ids))]
        tokens = [np.tile(state.eos_ids, len(with_eos))]
        first_key = slots[young] * state.vocab_size
        first = np.searchsorted(state.stop_keys, first_key)
        counts = np.searchsorted(state.stop_keys, first_key + state.vocab_size) - first
        rows.append(np.repeat(young, counts))
        at = np.arange(counts.sum()) + np.repeat(first - (np.cumsum(counts) - counts), counts)
        tokens.append(state.stop_keys[at] - np.repeat(first_key, counts))
        places = (self._tensor(np.concatenate(rows)), self._tensor(np.concatenate(tokens)))
        logits.index_put_(places, torch.full((), -math.inf, device=logits.device))

    def score_prompt(self, logits: torch.Tensor, slot: int, start: int) -> Callable[[], PromptLogprobs]:
        """Logprobs of the prompt tokens at `start … start + n - 1`; the call returned waits for them.

        logits: fp32 [n, V], of the positions before them. The call raises `NonFiniteError`.
        """
        count = len(logits)
        counts = np.full(count, self._state.prompt_logprobs[slot], np.int32)
        targets = self._tensor(self._state.tokens[slot, start : start + count].astype(np.int64))
        pieces = [slice(i, i + SCORED_ROWS) for i in range(0, count, SCORED_ROWS)]
        entries = [_entries(logits[i], targets[i], counts[i]) for i in pieces]
        ids, values = (torch.cat(parts) for parts in zip(*entries, strict=True))
        fetched = self._transfer.fetch(torch.isfinite(logits.amax(-1)).all(), ids, values)

        def collect() -> PromptLogprobs:
            finite, *found = fetched()
            if not finite:
                raise NonFiniteError(np.array([slot]))
            token_ids, values = _laid_end_to_end(counts, *found)
            return PromptLogprobs(slot, start, (counts + 1).astype(np.uint16), token_ids, values)

        return collect


def _entries(
    logits: torch.Tensor, tokens: torch.Tensor, counts: NDArray[np.int32]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and logprobs [n, 1 + most of `counts`] of each row: the token, then the most likely ones."""
    chosen, top_values, top_ids = token_logprobs(logits, tokens, int(counts.max()))
    return torch.cat((tokens[:, None], top_ids), dim=1), torch.cat((chosen[:, None], top_values), dim=1)


def _laid_end_to_end(
    counts: NDArray[np.int32], ids: Int64s, values: NDArray[np.float32]
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Of each row the token and its `counts` most likely ones."""
    kept = np.arange(ids.shape[1]) <= counts[:, None]
    return ids[kept].astype(np.int32), values[kept]
