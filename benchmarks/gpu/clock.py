"""When the steps of a runner begin and end, on the device and on the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.context import Context, Row
from executor_svc.runner import Runner


class Clock:
    """Notes when a step's work reaches the device and when the device is through with it."""

    def __init__(self, context: Context, runner: Runner) -> None:
        self._on_gpu = context.on_gpu
        self.starts: list[Any] = []
        self.ends: list[Any] = []
        self.host_starts: list[float] = []
        self.host_ends: list[float] = []
        inputs, sampler = runner.inputs, runner.sampler
        self._restore = [(inputs, "prepare"), (sampler, "draw"), (sampler, "collect")]
        self._wrap(inputs, "prepare", before=lambda: self._note(self.starts))
        self._wrap(sampler, "draw", after=lambda: self._note(self.ends))
        self._wrap(sampler, "collect", after=lambda: self.host_ends.append(time.perf_counter()))
        self._wrap(inputs, "logits", after=lambda: self.host_starts.append(time.perf_counter()))
        self._restore.append((inputs, "logits"))

    def _wrap(
        self, owner: Any, name: str, before: Callable[[], None] | None = None, after: Callable[[], None] | None = None
    ) -> None:
        call = getattr(owner, name)

        def noted(*arguments: Any) -> Any:
            if before:
                before()
            result = call(*arguments)
            if after:
                after()
            return result

        setattr(owner, name, noted)

    def _note(self, moments: list[Any]) -> None:
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            moments.append(event)
        else:
            moments.append(time.perf_counter())

    def remove(self) -> None:
        for owner, name in self._restore:
            delattr(owner, name)

    def _ms(self, first: Any, last: Any) -> float:
        return float(first.elapsed_time(last)) if self._on_gpu else (last - first) * 1e3

    def medians(self) -> Row:
        busy = [self._ms(first, last) for first, last in zip(self.starts, self.ends, strict=True)]
        bubbles = [self._ms(first, last) * 1e3 for first, last in zip(self.ends, self.starts[1:], strict=False)]
        host = [(b - a) * 1e6 for a, b in zip(self.host_ends, self.host_starts[1:], strict=False)]
        return {
            "device_ms": round(statistics.median(busy), 3),
            "bubble_us": round(statistics.median(bubbles), 1),
            "host_gap_us": round(statistics.median(host), 1),
        }
