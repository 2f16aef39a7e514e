"""Measured iterations from a plan log."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from scheduler_svc.plan_log import reader
from scheduler_svc.plan_log.differences import Difference
from scheduler_svc.plan_log.format import FormatError
from scheduler_svc.simulator.iteration import IterationSample


class LogError(Exception):
    """A plan log that cannot be read. The text names it."""


def logged(path: Path) -> Iterator[reader.IterationSample]:
    """Each acknowledged iteration of a log, in order. Raises `LogError`."""
    try:
        yield from reader.iterations(path)
    except (FormatError, Difference, OSError) as error:
        text = str(error)
        raise LogError(text if text.startswith(f"{path}: ") else f"{path}: {text}") from None


def iterations(path: Path, begin: float, end: float) -> Iterator[IterationSample]:
    """Those that were planned from `begin` to before `end`, by the log's clock. Raises `LogError`."""
    return (sample(one) for one in logged(path) if begin <= one.planned_at < end)


def executor_of(found: list[reader.IterationSample]) -> dict[str, int]:
    """What the executor that attached last can hold, as a cost model tells it."""
    last = max(found, key=lambda one: one.epoch)
    return {"block_size": last.block_size, "blocks": last.num_blocks, "seats": last.seats}


def sample(one: reader.IterationSample) -> IterationSample:
    """What the cost model needs of an iteration of the log."""
    return IterationSample(
        decodes=one.decodes,
        prefill_tokens=one.prefill_tokens,
        decode_context=one.decode_context,
        # The log counts a chunk as if each token attended to half of it; a token attends to itself too.
        prefill_attention=round(one.prefill_attention + one.prefill_tokens / 2),
        swapped_blocks=one.swapped_blocks,
        seconds=one.seconds,
    )
