"""Says in words where two plans, or two states, differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from common.wire import Message, NewSequence, Plan

MAX_SHOWN = 8
"""Rows that are named; of more, their number is told."""


class Difference(Exception):
    """The core decided otherwise than the log says. The text tells where and what."""


def compare_plans(recorded: Plan | None, replayed: Plan | None, name: Callable[[int], str]) -> str:
    """The fields of two plans that differ, one or more lines each; `name` tells who is in a slot."""
    if recorded is None or replayed is None:
        side, plan = ("the replay", replayed) if recorded is None else ("the log", recorded)
        assert plan is not None
        rows = [*plan.decodes.tolist(), *plan.prefills.tolist()]
        return f"  only {side} has a plan: {_list(f'{slot} {name(slot)}' for slot in rows)}"
    lines: list[str] = []
    lines += _rows("decodes", _decodes(recorded), _decodes(replayed), name)
    lines += _rows("prefills", _prefills(recorded), _prefills(replayed), name)
    lines += _rows("freed", _slots(recorded.freed), _slots(replayed.freed), name)
    lines += _rows("appended blocks", _appended(recorded), _appended(replayed), name)
    lines += _new(recorded, replayed, name)
    for field in ("epoch", "iteration", "copies", "swap_outs", "swap_ins"):
        one, two = _plain(getattr(recorded, field)), _plain(getattr(replayed, field))
        if one != two:
            lines.append(f"  {field}: {one} in the log, {two} replayed")
    lines += _order(recorded, replayed)
    return "\n".join(lines)


def _decodes(plan: Plan) -> dict[int, Any]:
    return dict.fromkeys(plan.decodes.tolist(), "")


def _prefills(plan: Plan) -> dict[int, Any]:
    return dict(zip(plan.prefills.tolist(), plan.prefill_lengths.tolist(), strict=True))


def _slots(column: Any) -> dict[int, Any]:
    return dict.fromkeys(column.tolist(), "")


def _appended(plan: Plan) -> dict[int, Any]:
    blocks: dict[int, list[int]] = {}
    for slot, block in zip(plan.appended_slots.tolist(), plan.appended_blocks.tolist(), strict=True):
        blocks.setdefault(slot, []).append(block)
    return blocks


def _rows(what: str, recorded: dict[int, Any], replayed: dict[int, Any], name: Callable[[int], str]) -> list[str]:
    """Rows by slot that are on one side only, or have another value there."""
    if recorded == replayed:
        return []
    lines = [f"  {what}: {len(recorded)} rows in the log, {len(replayed)} replayed"]
    for side, rows, other in (("the log", recorded, replayed), ("the replay", replayed, recorded)):
        alone = [f"slot {slot} {name(slot)} {rows[slot]}".rstrip() for slot in rows if slot not in other]
        if alone:
            lines.append(f"    only in {side}: {_list(alone)}")
    changed = [
        f"slot {slot} {name(slot)}: {recorded[slot]} in the log, {replayed[slot]} replayed"
        for slot in recorded
        if slot in replayed and recorded[slot] != replayed[slot]
    ]
    return [*lines, *(f"    {text}" for text in changed[:MAX_SHOWN])]


def _new(recorded: Plan, replayed: Plan, name: Callable[[int], str]) -> list[str]:
    one, two = ({item.slot: item for item in plan.new} for plan in (recorded, replayed))
    lines = _rows("new sequences", dict.fromkeys(one, ""), dict.fromkeys(two, ""), name)
    for slot, item in one.items():
        if slot in two and item != two[slot]:
            fields = ", ".join(_fields(item, two[slot]))
            lines.append(f"  new sequence in slot {slot} {name(slot)}: {fields}")
    return lines


def _fields(recorded: NewSequence, replayed: NewSequence) -> Iterator[str]:
    for field, _ in NewSequence.wire_fields:
        one, two = getattr(recorded, field), getattr(replayed, field)
        if isinstance(one, np.ndarray):
            if not np.array_equal(one, two):
                yield f"{field} {_plain(one)} in the log, {_plain(two)} replayed"
        elif one != two:
            yield field if isinstance(one, Message) else f"{field} {one} in the log, {two} replayed"


def _order(recorded: Plan, replayed: Plan) -> list[str]:
    """Columns that hold the same rows in another order."""
    lines = []
    for field in ("decodes", "prefills", "freed", "appended_slots"):
        one, two = getattr(recorded, field).tolist(), getattr(replayed, field).tolist()
        if one != two and sorted(one) == sorted(two):
            at = next(i for i, (a, b) in enumerate(zip(one, two, strict=True)) if a != b)
            lines.append(f"  {field}: another order from place {at} on")
    if [item.slot for item in recorded.new] != [item.slot for item in replayed.new]:
        lines.append("  new sequences: another order")
    return lines


def _plain(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    return _list(str(item) for item in value.tolist())


def _list(items: Any) -> str:
    shown = list(items)
    more = f", … {len(shown)} in all" if len(shown) > MAX_SHOWN else ""
    return "[" + ", ".join(shown[:MAX_SHOWN]) + more + "]"
