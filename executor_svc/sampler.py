"""From raw logits to tokens and logprobs, every row by its own parameters.

The order, as in vLLM: logprobs are read off the raw logits; then logit bias, penalties, and the masks of min_tokens
change them; then temperature, top-k, top-p and min-p, and the draw. The draw is keyed by (seed, position of the token
in its sequence), so it does not depend on the batch, nor on when or where the row runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from common.wire import LogprobColumns, PromptLogprobs
from executor_svc.batch import BatchState, Work
from executor_svc.seen_tokens import SeenTokens
from kernels import SamplingColumns, apply_penalties, sample, token_logprobs

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


class Sampler:
    """Samples for one batch state. Touches Python objects only for rows with a logit bias."""

    def __init__(self, state: BatchState, device: torch.device) -> None:
        self._state, self._device = state, device
        self._seen = SeenTokens(state)

    def clear(self) -> None:
        """Forget every sequence."""
        self._seen.clear()

    def sample(self, logits: torch.Tensor, work: Work) -> Sampled:
        """Draw a token for each sampled row. logits: fp32 [R, V], overwritten. Raises `NonFiniteError`."""
        state, slots = self._state, work.sample_slots
        counts = state.logprobs[slots]
        scored = np.flatnonzero(counts >= 0)
        raw = logits[self._tensor(scored)] if len(scored) else None
        finite = torch.isfinite(logits.amax(-1))
        self._add_bias(logits, slots)
        self._penalise(logits, slots)
        self._mask_ends(logits, slots)
        drawn = sample(logits, self._columns(slots))
        tokens = torch.where(finite, drawn, -1).cpu().numpy()
        if (tokens < 0).any():
            raise NonFiniteError(slots[tokens < 0])
        if raw is None:
            return Sampled(tokens, LogprobColumns())
        return Sampled(tokens, self._logprobs(raw, tokens, scored, counts[scored]))

    def _tensor(self, array: NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device, non_blocking=True)

    def _columns(self, slots: Int64s) -> SamplingColumns:
        state = self._state
        return SamplingColumns(
            temperature=self._tensor(state.temperature[slots]),
            top_k=self._tensor(state.top_k[slots]),
            top_p=self._tensor(state.top_p[slots]),
            min_p=self._tensor(state.min_p[slots]),
            seed=self._tensor(state.seed[slots]),
            position=self._tensor(state.length[slots].astype(np.int64)),
        )

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
        """Before `min_tokens` are there, neither EOS (unless it is ignored anyway) nor a stop token may be drawn."""
        state = self._state
        young = np.flatnonzero(state.length[slots] < state.min_length[slots])
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
        logits.index_put_(places, torch.tensor(-math.inf, device=logits.device))

    def _logprobs(self, raw: torch.Tensor, tokens: Int64s, scored: Int64s, counts: NDArray[np.int32]) -> LogprobColumns:
        token_ids, values = self._scores(raw, tokens[scored], counts)
        return LogprobColumns(
            rows=scored.astype(np.uint16), widths=(counts + 1).astype(np.uint16), token_ids=token_ids, values=values
        )

    def _scores(
        self, logits: torch.Tensor, tokens: NDArray[np.integer], counts: NDArray[np.int32]
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Entries of all rows end to end: the token, then the row's `counts` most likely ones."""
        targets = self._tensor(tokens.astype(np.int64))
        chosen, top_values, top_ids = token_logprobs(logits, targets, int(counts.max()))
        ids = torch.cat((targets[:, None], top_ids), dim=1).cpu().numpy()
        values = torch.cat((chosen[:, None], top_values), dim=1).cpu().numpy()
        kept = np.arange(ids.shape[1]) <= counts[:, None]
        return ids[kept].astype(np.int32), values[kept]

    def score_prompt(self, logits: torch.Tensor, slot: int, start: int) -> PromptLogprobs:
        """Logprobs of the prompt tokens at `start … start + n - 1`.

        logits: fp32 [n, V], of the positions before them. Raises `NonFiniteError`.
        """
        state = self._state
        if not bool(torch.isfinite(logits.amax(-1)).all()):
            raise NonFiniteError(np.array([slot]))
        count = len(logits)
        tokens = state.tokens[slot, start : start + count]
        counts = np.full(count, state.prompt_logprobs[slot], np.int32)
        parts = [
            self._scores(logits[i : i + SCORED_ROWS], tokens[i : i + SCORED_ROWS], counts[i : i + SCORED_ROWS])
            for i in range(0, count, SCORED_ROWS)
        ]
        return PromptLogprobs(
            slot=slot,
            start=start,
            widths=(counts + 1).astype(np.uint16),
            token_ids=np.concatenate([ids for ids, _ in parts]),
            values=np.concatenate([values for _, values in parts]),
        )
