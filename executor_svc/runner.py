"""Runs plans on the model: batch state, KV blocks, forward pass, sampler.

A failure is answered with a `Fault`; the process goes on, unless the device is beyond use.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import structlog
import torch
from numpy.typing import NDArray

from common.wire import Fault, Limits, LogprobColumns, ModelCard, Plan, PromptLogprobs, Result
from executor_svc.batch import BatchState, PlanError, Work
from executor_svc.kv_cache import KVCache, KVShape
from executor_svc.link import FatalError
from executor_svc.sampler import NonFiniteError, Sampled, Sampler
from kernels import AttentionBatch

log = structlog.get_logger()


MAX_SCORED_BYTES = 256 << 20
"""Memory that the logits of prompt rows may take at a time."""
NOTHING_SAMPLED = Sampled(np.empty(0, np.int64), LogprobColumns())


@dataclass(frozen=True, slots=True)
class PromptPiece:
    """Token rows whose logits score the prompt tokens at `start`, `start` + 1, …"""

    slot: int
    start: int
    token_rows: NDArray[np.int64]


class Model(Protocol):
    """The forward pass; see `executor_svc.model`."""

    @property
    def config(self) -> KVShape: ...

    device: torch.device
    dtype: torch.dtype

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
        sampled = NOTHING_SAMPLED
        prompt_logprobs: list[PromptLogprobs] = []
        for number, pieces in enumerate(self._passes(work) if len(work.slots) else ()):
            logit_rows = work.logit_rows if number == 0 else np.empty(0, np.int64)
            logits = self._forward(work, np.concatenate((logit_rows, *(piece.token_rows for piece in pieces))))
            place = len(logit_rows)
            for piece in pieces:
                part = logits[place : place + len(piece.token_rows)]
                prompt_logprobs.append(self.sampler.score_prompt(part, piece.slot, piece.start))
                place += len(piece.token_rows)
            if len(logit_rows):
                sampled = self.sampler.sample(logits[: len(logit_rows)], work)
        device_us = int((time.perf_counter() - device_started) * 1e6)
        finish = self.state.advance(work, sampled.tokens)
        return Result(
            epoch=plan.epoch,
            iteration=plan.iteration,
            tokens=sampled.tokens.astype(np.int32),
            finish=finish,
            logprobs=sampled.logprobs,
            prompt_logprobs=tuple(prompt_logprobs),
            busy_us=int((time.perf_counter() - started) * 1e6),
            device_us=device_us,
        )

    def _passes(self, work: Work) -> list[list[PromptPiece]]:
        """What each forward pass scores of the prompts; nearly always there is one pass, and nothing to score.

        All prompt rows' logits at once can be more than the memory holds. The pass is then run again for the rest: it
        writes the same KV once more.
        """
        passes: list[list[PromptPiece]] = [[]]
        limit = max(64, MAX_SCORED_BYTES // (4 * self.state.vocab_size))
        room = limit
        for row in work.prompt_rows.tolist():
            slot = int(work.slots[row])
            first, last = int(work.query_start[row]), int(work.query_start[row + 1])
            # Token row `first` predicts the prompt token behind the computed ones.
            start = int(self.state.computed[slot]) + 1
            last = min(last, first + int(self.state.prompt_length[slot]) - start)
            while first < last:
                if not room:
                    passes.append([])
                    room = limit
                count = min(room, last - first)
                passes[-1].append(PromptPiece(slot, start, np.arange(first, first + count, dtype=np.int64)))
                first, start, room = first + count, start + count, room - count
        return passes

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


def _fault(plan: Plan, reason: str, message: str, slots: NDArray[np.int64] | None = None) -> Fault:
    guilty = np.empty(0, np.uint16) if slots is None else slots.astype(np.uint16)
    return Fault(plan.epoch, plan.iteration, guilty, reason, message[:4096])
