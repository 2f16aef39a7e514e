"""Puts rows of the ring, lanes and the queue into messages."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nsmallest
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from common.wire import SeenBlocks, SeenLane, SeenWaiting
from common.wire.watching import NOBODY
from scheduler_svc.core import Lane, Scheduler
from scheduler_svc.watching.ring import LOW_32, Row, describe, seen

MAX_WAITING = 64
"""Waiting sequences that are told of, of each model."""
MAX_LOOKED_AT = 256
"""Members of one line among which the first are sought; the very first is always among them (a heap's top)."""


def columns(rows: list[Row]) -> dict[str, NDArray[np.generic]]:
    """The columns of `Iterations`."""
    if not rows:
        return {}
    left = [item for row in rows for item in row.left]
    return {
        "epochs": np.array([row.epoch for row in rows], np.int64),
        "iterations": np.array([row.iteration for row in rows], np.int64),
        "planned_at": np.array([row.planned_at for row in rows]),
        "seconds": np.array([row.seconds for row in rows]),
        "lost": np.array([row.lost for row in rows], np.uint8),
        "num_decodes": np.array([len(row.decodes) for row in rows], np.uint16),
        "num_prefills": np.array([len(row.prefills) for row in rows], np.uint16),
        "num_left": np.array([len(row.left) for row in rows], np.uint16),
        "decode_slots": np.concatenate([row.decodes for row in rows]),
        "decode_sequences": np.concatenate([row.decode_sequences for row in rows]),
        "prefill_slots": np.concatenate([row.prefills for row in rows]),
        "prefill_sequences": np.concatenate([row.prefill_sequences for row in rows]),
        "prefill_lengths": np.concatenate([row.prefill_lengths for row in rows]),
        "left_slots": np.array([slot for slot, _, _ in left], np.uint16),
        "left_sequences": np.array([sequence for _, sequence, _ in left], np.uint32),
        "left_how": np.array([how for _, _, how in left], np.uint8),
    }


def attached(lane: Lane, state: str) -> SeenLane:
    """A lane that is there."""
    pool = lane.pool
    return describe(lane, state, running=lane.num_running, referenced=pool.num_referenced, cached=pool.num_cached_only)


def blocks(lane: Lane, most: int, *, with_holders: bool) -> SeenBlocks:
    """What the blocks of a lane hold; of more than `most`, evenly spread ones. The holders are `NOBODY` unless wanted:
    they are sought in the tables of all that run.
    """
    step = max(1, -(-lane.pool.num_blocks // most))
    states = np.array(lane.pool.states(step), np.uint8)
    if not with_holders:
        return SeenBlocks(lane.epoch, step, states, np.full(len(states), NOBODY, np.uint32))
    holders = np.full(lane.pool.num_blocks, NOBODY, np.uint32)
    seated = lane.running()
    if seated:
        slots = [sequence.slot for sequence in seated]
        counts = lane.num_blocks[slots]
        tables = [lane.blocks[slot, :count] for slot, count in zip(slots, counts.tolist(), strict=True)]
        numbers = np.array([sequence.number & LOW_32 for sequence in seated], np.uint32)
        holders[np.concatenate(tables)] = np.repeat(numbers, counts)
    return SeenBlocks(lane.epoch, step, states, holders[::step].copy())


def waiting(scheduler: Scheduler, now: float) -> Iterable[SeenWaiting]:
    """The first in line of each model, by key."""
    for queue in scheduler.queues.values():
        looked_at = [s for line in (queue.short, queue.long, queue.beyond) for s in islice(line, MAX_LOOKED_AT)]
        for sequence in nsmallest(MAX_WAITING, looked_at, key=lambda s: s.key):
            yield SeenWaiting(
                seen=seen(sequence),
                reason=scheduler.why(sequence).value,
                waited_s=sum(queue.waited(sequence, now).values()),
                generated_tokens=sequence.num_generated,
                num_preemptions=sequence.num_preemptions,
            )
