"""What programs read from a plan log: its frames, who was in each iteration, and what each iteration cost.

`path` is a segment file or a folder of segments; a log that is being written can be read too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common.wire import Plan
from scheduler_svc.core import Lane
from scheduler_svc.plan_log.player import Player, sequence_name
from scheduler_svc.plan_log.segments import Frame, frames_of, segments


def frames(path: Path) -> Iterator[Frame]:
    """All frames. Raises `FormatError` for what is no plan log or is damaged."""
    return frames_of(segments(path))


def rows(path: Path) -> Iterator[dict[str, Any]]:
    """Plans and results as plain records, in the order of their making.

    A plan's record has `t` (seconds), `lane`, `epoch`, `iteration`, `decodes` with rows `[slot, name]` and `prefills`
    with rows `[slot, name, tokens]`; a result's has `finished`, `busy_us` and `device_us` instead of the rows. Names
    are `request/stream`. Raises what `Player.steps` raises.
    """
    for step in Player(path).steps():
        lane = step.lane
        if lane is None or step.raised:
            continue
        common = {"t": step.now, "lane": lane.name, "epoch": lane.epoch}
        if step.plan is not None:
            prefills = zip(step.plan.prefills.tolist(), step.plan.prefill_lengths.tolist(), strict=True)
            yield common | {
                "iteration": step.plan.iteration,
                "decodes": [[slot, sequence_name(lane, slot)] for slot in step.plan.decodes.tolist()],
                "prefills": [[slot, sequence_name(lane, slot), tokens] for slot, tokens in prefills],
            }
        elif step.result is not None:
            yield common | {
                "iteration": step.result.iteration,
                "finished": int((step.result.finish != 0).sum()),
                "busy_us": step.result.busy_us,
                "device_us": step.result.device_us,
            }


class IterationSample(NamedTuple):
    """One acknowledged iteration: what it held and how long it took."""

    lane: str
    epoch: int
    iteration: int
    planned_at: float
    seconds: float
    """From the plan to its result, by the scheduler's clock."""
    busy_us: int
    device_us: int
    decodes: int
    """Rows that computed one token."""
    prefill_tokens: int
    decode_context: int
    """Sum of the lengths of the decode rows' contexts, in tokens."""
    prefill_attention: float
    """Sum over the prefill chunks of `chunk * (tokens computed before + chunk / 2)`."""
    swapped_blocks: int
    seats: int
    """Of the lane, as are the following."""
    num_blocks: int
    block_size: int


def iterations(path: Path) -> Iterator[IterationSample]:
    """Every iteration whose result came. Raises what `Player.steps` raises."""
    under_way: dict[int, IterationSample] = {}
    for step in Player(path).steps():
        lane = step.lane
        if lane is None:
            continue
        if step.plan is not None:
            under_way[lane.epoch] = _planned(lane, step.plan, step.now)
        elif step.result is not None and not step.raised:
            work = under_way.pop(lane.epoch, None)
            if work is not None:
                took = step.now - work.planned_at
                yield work._replace(seconds=took, busy_us=step.result.busy_us, device_us=step.result.device_us)


def _planned(lane: Lane, plan: Plan, now: float) -> IterationSample:
    """What a plan holds, before it is known how long it takes; the lane is in the state before its result."""
    chunks = plan.prefill_lengths.astype(np.float64)
    return IterationSample(
        lane=lane.name,
        epoch=lane.epoch,
        iteration=plan.iteration,
        planned_at=now,
        seconds=0.0,
        busy_us=0,
        device_us=0,
        decodes=len(plan.decodes),
        prefill_tokens=int(plan.prefill_lengths.sum()),
        decode_context=int(lane.length[plan.decodes].sum()),
        prefill_attention=float((chunks * (lane.computed[plan.prefills] + chunks / 2)).sum()),
        swapped_blocks=(len(plan.swap_outs) + len(plan.swap_ins)) // 2,
        seats=lane.seats,
        num_blocks=lane.limits.num_blocks,
        block_size=lane.block_size,
    )
