"""The whole state of the core as bytes, from which it goes on as if it had never stopped."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np

from common.wire import SamplingParams
from scheduler_svc.core import Lane, Scheduler, SchedulerConfig, Sequence, State
from scheduler_svc.plan_log.state_codec import GONE, Packing, Restoring
from scheduler_svc.plan_log.state_schema import SCHEMA


def pack_state(scheduler: Scheduler) -> bytes:
    """The state between two verbs; an iteration may be in flight. What is in the outbox counts as sent."""
    members = {sequence.number: sequence for sequence in scheduler.live.values()}
    for lane in scheduler.lanes.values():
        members |= {sequence.number: sequence for sequence in lane.running()}
    packing = Packing(SCHEMA, set(members))
    state = {
        "sequences": [SCHEMA[Sequence].pack(sequence, packing) for sequence in members.values()],
        "lanes": [SCHEMA[Lane].pack(lane, packing) for lane in scheduler.lanes.values()],
        "scheduler": SCHEMA[Scheduler].pack(scheduler, packing),
        "cards": packing.cards,
    }
    data: bytes = msgpack.packb(state, use_bin_type=True)
    return data


def unpack_state(config: SchedulerConfig, data: bytes) -> Scheduler:
    """A scheduler in this state. Raises `FormatError` when another version wrote it."""
    state = msgpack.unpackb(data, strict_map_key=False)
    restoring = Restoring(SCHEMA, config, state["cards"])
    # Sequences and lanes name each other, so all sequences are there before any has its fields.
    restoring.sequences = {fields["number"]: Sequence.__new__(Sequence) for fields in state["sequences"]}
    restoring.sequences[GONE] = _stranger()
    for fields in state["lanes"]:
        lane = Lane.__new__(Lane)
        SCHEMA[Lane].restore(lane, fields, restoring)
        restoring.lanes[lane.epoch] = lane
    for fields in state["sequences"]:
        SCHEMA[Sequence].restore(restoring.sequences[fields["number"]], fields, restoring)
    scheduler = Scheduler.__new__(Scheduler)
    SCHEMA[Scheduler].restore(scheduler, state["scheduler"], restoring)
    return scheduler


def _stranger() -> Sequence:
    """Stands in for all that have ended."""
    nothing = np.empty(0, np.int32)
    return Sequence(0, 0, 0, "", "", SamplingParams(1), 0, GONE, 0.0, nothing, 0, state=State.FINISHED)


def compare_states(recorded: bytes, replayed: bytes) -> str:
    """Where two states differ, in words; empty where they do not."""
    if recorded == replayed:
        return ""
    one, two = (msgpack.unpackb(data, strict_map_key=False) for data in (recorded, replayed))
    return _first_difference(one, two, "")


def _first_difference(one: Any, two: Any, path: str) -> str:
    if isinstance(one, dict) and isinstance(two, dict) and one.keys() == two.keys():
        pairs = ((f"{path}.{name}" if path else name, one[name], two[name]) for name in one)
    elif isinstance(one, list) and isinstance(two, list) and len(one) == len(two):
        pairs = ((f"{path}[{i}]", *items) for i, items in enumerate(zip(one, two, strict=True)))
    else:
        return "" if one == two else f"{path}: {_show(one)} in the log, {_show(two)} replayed"
    return next((found for where, a, b in pairs if (found := _first_difference(a, b, where))), "")


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{type(value).__name__} of length {len(value)}, {text[:60]}…"
