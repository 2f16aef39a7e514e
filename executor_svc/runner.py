"""Runs plans on the model: batch state, KV blocks, forward pass, sampler.

A failure is answered with a `Fault`; the process goes on, unless the device is beyond use.
"""

from __future__ import annotations

import time
from typing import Protocol

import numpy as np
import structlog
import torch
from numpy.typing import NDArray

from common.wire import Fault, Limits, LogprobColumns, ModelCard, Plan, PromptLogprobs, Result
from executor_svc.batch import BatchState, PlanError, Work
from executor_svc.kv_cache import KVCache, KVShape
from executor_svc.link import FatalError
from executor_svc.sampler import NonFiniteError, Sampler
from kernels import AttentionBatch

log = structlog.get_logger()


class Model(Protocol):
    """The forward pass; see `executor_svc.model`."""

    @property
    def config(self) -> KVShape: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        batch: AttentionBatch,
        cache: KVCache,
        logit_rows: torch.Tensor,
    ) -> torch.Tensor: ...


class Runner:
    """Handler of an executor's plans."""

    def __init__(self, model: Model, card: ModelCard, limits: Limits) -> None:
        self.model, self.limits = model, limits
        self.state = BatchState(limits, card.max_model_len, card.vocab_size, card.eos_ids)
        self.sampler = Sampler(self.state, model.device)
        self.cache = self._allocate(limits.num_blocks, model.device)
        self.host = self._allocate(limits.num_host_blocks, torch.device("cpu")) if limits.num_host_blocks else None

    def _allocate(self, num_blocks: int, device: torch.device) -> KVCache:
        model = self.model
        pin = device.type == "cpu" and model.device.type == "cuda"
        return KVCache.allocate(model.config, num_blocks, self.limits.block_size, model.dtype, device, pin=pin)

    def reset(self) -> None:
        """Forget every sequence. What the KV blocks hold stays, and is not read before it is written again."""
        self.state.clear()
        self.sampler.clear()

    @torch.inference_mode()
    def run(self, plan: Plan) -> Result | Fault:
        """Run one iteration. Raises `FatalError` only."""
        started = time.perf_counter()
        try:
            work = self.state.apply(plan)
            self._move_blocks(plan)
            return self._compute(plan, work, started)
        except PlanError as error:
            return _fault(plan, "plan", str(error), error.slots)
        except NonFiniteError as error:
            return _fault(plan, "nan", str(error), error.slots)
        except torch.OutOfMemoryError as error:
            return _fault(plan, "memory", str(error))
        except torch.AcceleratorError as error:
            raise FatalError(_fault(plan, "device", str(error))) from error
        except Exception as error:
            log.exception("an iteration failed", iteration=plan.iteration)
            return _fault(plan, "error", f"{type(error).__name__}: {error}")

    def _move_blocks(self, plan: Plan) -> None:
        if self.host is not None and len(plan.swap_outs):
            self.host.fetch(self.cache, plan.swap_outs)
        if self.host is not None and len(plan.swap_ins):
            self.cache.fetch(self.host, plan.swap_ins)
        if len(plan.copies):
            self.cache.copy(plan.copies)

    def _compute(self, plan: Plan, work: Work, started: float) -> Result:
        device_started = time.perf_counter()
        tokens = np.empty(0, np.int64)
        logprobs = LogprobColumns()
        prompt_logprobs: tuple[PromptLogprobs, ...] = ()
        if len(work.slots):
            prompt_rows = [self._prompt_tokens(work, row) for row in work.prompt_rows.tolist()]
            logits = self._forward(work, np.concatenate((work.logit_rows, *prompt_rows)))
            prompt_logprobs = self._score_prompts(logits[len(work.sample_rows) :], work, prompt_rows)
            if len(work.sample_rows):
                sampled = self.sampler.sample(logits[: len(work.sample_rows)], work)
                tokens, logprobs = sampled.tokens, sampled.logprobs
        device_us = int((time.perf_counter() - device_started) * 1e6)
        finish = self.state.advance(work, tokens)
        return Result(
            epoch=plan.epoch,
            iteration=plan.iteration,
            tokens=tokens.astype(np.int32),
            finish=finish,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            busy_us=int((time.perf_counter() - started) * 1e6),
            device_us=device_us,
        )

    def _forward(self, work: Work, logit_rows: NDArray[np.int64]) -> torch.Tensor:
        device = self.model.device

        def tensor(array: NDArray[np.generic]) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)

        batch = AttentionBatch(
            query_start=tensor(work.query_start),
            context_lens=tensor(work.context_lens),
            block_tables=tensor(work.block_tables),
            max_query_len=work.max_query_len,
            max_context_len=work.max_context_len,
            num_decodes=work.num_decodes,
        )
        return self.model.forward(
            tensor(work.token_ids), tensor(work.positions), tensor(work.kv_slots), batch, self.cache, tensor(logit_rows)
        )

    def _prompt_tokens(self, work: Work, row: int) -> NDArray[np.int64]:
        """Token rows of a prefill chunk that predict prompt tokens: all but one for the prompt's last token."""
        first, last = int(work.query_start[row]), int(work.query_start[row + 1])
        slot = int(work.slots[row])
        left = int(self.state.prompt_length[slot]) - 1 - int(self.state.computed[slot])
        return np.arange(first, min(last, first + left), dtype=np.int64)

    def _score_prompts(
        self, logits: torch.Tensor, work: Work, prompt_rows: list[NDArray[np.int64]]
    ) -> tuple[PromptLogprobs, ...]:
        scores, first = [], 0
        for row, token_rows in zip(work.prompt_rows.tolist(), prompt_rows, strict=True):
            slot = int(work.slots[row])
            part = logits[first : first + len(token_rows)]
            scores.append(self.sampler.score_prompt(part, slot, int(self.state.computed[slot]) + 1))
            first += len(token_rows)
        return tuple(scores)


def _fault(plan: Plan, reason: str, message: str, slots: NDArray[np.int64] | None = None) -> Fault:
    guilty = np.empty(0, np.uint16) if slots is None else slots.astype(np.uint16)
    return Fault(plan.epoch, plan.iteration, guilty, reason, message[:4096])
