"""Runs plans on the model: batch state, KV blocks, forward pass, sampler.

A failure is answered with a `Fault`; the process goes on, unless the device is beyond use.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import structlog
import torch
from numpy.typing import NDArray

from common.wire import Fault, Limits, LogprobColumns, ModelCard, Plan, PromptLogprobs, Result
from executor_svc.batch import BatchState, PlanError, Work
from executor_svc.constraints import Constraints
from executor_svc.device_inputs import DeviceInputs
from executor_svc.faults import FatalError
from executor_svc.graphs import Eager, Recorder
from executor_svc.host_blocks import HostBlocks
from executor_svc.inputs import HostInputs, Inputs, Model
from executor_svc.kv_cache import KVCache
from executor_svc.sampler import Drawing, NonFiniteError, Sampled, Sampler

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


class Runner:
    """Handler of an executor's plans."""

    def __init__(
        self,
        model: Model,
        card: ModelCard,
        limits: Limits,
        *,
        cache_dtype: torch.dtype | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """cache_dtype: of the KV blocks; None: the model's.

        recorder: makes graphs of iterations, which takes a batch state on the device. None: no graphs; and on the CPU,
        where the device's memory is the host's, no second state either.
        """
        self.model, self.limits = model, limits
        self.state = BatchState(limits, card.max_model_len, card.vocab_size, card.eos_ids)
        self.constraints = Constraints(self.state, card)
        self.sampler = Sampler(self.state, model.device, self.constraints)
        self.cache = KVCache.allocate(
            model.config, limits.num_blocks, limits.block_size, cache_dtype or model.dtype, model.device
        )
        self.host = HostBlocks(self.cache, limits.num_host_blocks) if limits.num_host_blocks else None
        self.inputs: Inputs
        self.compiles = recorder is not None or model.device.type != "cpu"
        """Whether the first iteration of a kind may wait for a compiler."""
        if self.compiles:
            self.inputs = DeviceInputs(self.state, model, self.cache, recorder or Eager())
        else:
            self.inputs = HostInputs(self.state, model, self.cache)

    @torch.inference_mode()
    def capture(self) -> int:
        """Record the graphs. Nothing may be running. Returns how many there are."""
        return self.inputs.capture()

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
            self.constraints.take(plan)
            self._move_blocks(plan)
            return self._compute(plan, work, started)
        except PlanError as error:
            return _fault(plan, "plan", str(error), error.slots)
        except NonFiniteError as error:
            return _fault(plan, "nan", str(error), error.slots)
        except (torch.OutOfMemoryError, MemoryError) as error:
            return _fault(plan, "memory", str(error))
        except torch.AcceleratorError as error:
            raise FatalError(_fault(plan, "device", str(error))) from error
        except Exception as error:
            log.exception("an iteration failed", iteration=plan.iteration)
            return _fault(plan, "error", f"{type(error).__name__}: {error}")

    def _move_blocks(self, plan: Plan) -> None:
        if self.host is not None and len(plan.swap_outs):
            self.host.take(plan.swap_outs)
        if self.host is not None and len(plan.swap_ins):
            self.host.give(plan.swap_ins)
        if len(plan.copies):
            self.cache.copy(plan.copies)

    def _compute(self, plan: Plan, work: Work, started: float) -> Result:
        """On a GPU all is queued before the first wait; so what the host does before it costs the device nothing."""
        device_started = time.perf_counter()
        self.inputs.prepare(plan, work)
        drawing: Drawing | None = None
        scored: list[Callable[[], PromptLogprobs]] = []
        for number, pieces in enumerate(self._passes(work) if len(work.slots) else ()):
            logit_rows = work.logit_rows if number == 0 else np.empty(0, np.int64)
            logits = self.inputs.logits(np.concatenate((logit_rows, *(piece.token_rows for piece in pieces))))
            place = len(logit_rows)
            for piece in pieces:
                part = logits[place : place + len(piece.token_rows)]
                scored.append(self.sampler.score_prompt(part, piece.slot, piece.start))
                place += len(piece.token_rows)
            if len(logit_rows):
                drawing = self.sampler.draw(logits[: len(logit_rows)], work, self.inputs.columns())
                self.inputs.keep(drawing.tokens)
        prompt_logprobs = tuple(collect() for collect in scored)
        sampled = NOTHING_SAMPLED if drawing is None else self.sampler.collect(drawing)
        device_us = int((time.perf_counter() - device_started) * 1e6)
        finish = self.state.advance(work, sampled.tokens, sampled.undrawn)
        self.constraints.look_ahead(work.sample_slots)
        return Result(
            epoch=plan.epoch,
            iteration=plan.iteration,
            tokens=sampled.tokens.astype(np.int32),
            finish=finish,
            logprobs=sampled.logprobs,
            prompt_logprobs=prompt_logprobs,
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


def _fault(plan: Plan, reason: str, message: str, slots: NDArray[np.int64] | None = None) -> Fault:
    guilty = np.empty(0, np.uint16) if slots is None else slots.astype(np.uint16)
    return Fault(plan.epoch, plan.iteration, guilty, reason, message[:4096])
