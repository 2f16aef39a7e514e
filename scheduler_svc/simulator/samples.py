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


def iterations(path: Path, begin: float = float("-inf"), end: float = float("inf")) -> Iterator[IterationSample]:
    """Each acknowledged iteration that was planned from `begin` to before `end`, by the log's clock, in order.

    Raises `LogError`.
    """
    try:
        for one in reader.iterations(path):
            if begin <= one.planned_at < end:
                yield sample(one)
    except (FormatError, Difference, OSError) as error:
        raise LogError(f"{path}: {error}") from None


def executor_of(path: Path) -> dict[str, int]:
    """What the last executor that attached can hold, as a cost model tells it. Raises `LogError`."""
    found: dict[str, int] = {}
    try:
        for lane in reader.lanes(path):
            found = {"block_size": lane.block_size, "blocks": lane.limits.num_blocks, "seats": lane.seats}
    except (FormatError, Difference, OSError) as error:
        raise LogError(f"{path}: {error}") from None
    return found


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
