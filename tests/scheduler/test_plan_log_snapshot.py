"""Snapshots: a segment of the plan log plays by itself, whatever was under way when it began."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

import scheduler_svc.core
from common.wire import encode
from scheduler_svc.core import Scheduler, SchedulerConfig
from scheduler_svc.core.config import Admission, Batching, Discipline, Eviction, Handover, KvLayout, Preemption, Prefill
from scheduler_svc.core.drain_rate import DrainRate
from scheduler_svc.core.handover import Transit
from scheduler_svc.core.sequence import SwappedKv
from scheduler_svc.plan_log import writer
from scheduler_svc.plan_log.differences import Difference
from scheduler_svc.plan_log.format import FormatError, Kind
from scheduler_svc.plan_log.player import Player
from scheduler_svc.plan_log.replay import main
from scheduler_svc.plan_log.snapshot import compare_states, pack_state, unpack_state
from scheduler_svc.plan_log.state_codec import Plain, Record
from scheduler_svc.plan_log.state_schema import SCHEMA
from tests.scheduler.recorded import RecordedWorld, eventful, wander

CONFIGS = {
    "default": SchedulerConfig(handover=Handover.ALWAYS),
    "swap, weights": SchedulerConfig(
        preemption=Preemption.SWAP, eviction=Eviction.LFU, admission=Admission.IMMEDIATE,
        discipline=Discipline.PRIORITY, ageing_s=1.0, target_itl_ms=20.0, max_num_batched_tokens=32,
    ),
    "fair, fifo": SchedulerConfig(
        discipline=Discipline.FAIR, eviction=Eviction.FIFO, admission=Admission.IMMEDIATE, tenant_weights={"a": 3.0},
        isolate_tenants=True, max_num_seqs=4,
    ),
    "deadlines, runs": SchedulerConfig(
        discipline=Discipline.DEADLINE, kv=KvLayout.CONTIGUOUS, preemption=Preemption.NONE, prefill=Prefill.SEPARATE,
        default_deadline_s=2.0, ageing_s=1.0,
    ),
    "by request": SchedulerConfig(batching=Batching.REQUEST, chunked_prefill=False, max_waiting=9, hold_s=1.0),
}  # fmt: skip

TRANSIENT = {"_Room", "Planner", "Seating", "Gate", "Applied", "SchedulerConfig", "SwappedKv"}
"""Classes whose objects do not outlive a verb, are given, or have a codec of their own."""


def fields_of(value: Any) -> set[str]:
    slots = {name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())}
    return slots | set(getattr(value, "__dict__", ()))


def walk(value: Any, seen: dict[int, Any], found: dict[type, set[str]]) -> None:
    """Note the fields of every object of the core that can be reached."""
    if id(value) in seen or isinstance(value, str | bytes | int | float | Enum | type(None)):
        return
    seen[id(value)] = value
    if isinstance(value, dict):
        for item in [*value.keys(), *value.values()]:
            walk(item, seen, found)
    elif isinstance(value, list | tuple | set):
        for item in value:
            walk(item, seen, found)
    elif type(value).__module__.startswith("scheduler_svc.") and not isinstance(value, SchedulerConfig):
        kind = Scheduler if isinstance(value, Scheduler) else type(value)
        found.setdefault(kind, set()).update(fields_of(value))
        for name in fields_of(value):
            walk(getattr(value, name), seen, found)


def test_the_schema_names_every_field_of_the_core(tmp_path: Path) -> None:
    found: dict[type, set[str]] = {}
    for place, config in enumerate(CONFIGS.values()):
        world = wander(RecordedWorld(tmp_path / str(place), config), place, 300)
        walk(world.scheduler, {}, found)
        sought = {SwappedKv: config.preemption is Preemption.SWAP, Transit: config.handover is Handover.ALWAYS}
        for seed in range(400):
            if not any(wanted and kind not in found for kind, wanted in sought.items()):
                break
            walk(wander(world, seed, 5).scheduler, {}, found)
        scheduler = unpack_state(config, pack_state(world.scheduler))
        plain: dict[type, set[str]] = {}
        walk(scheduler, {}, plain)
        assert plain[Scheduler] == SCHEMA[Scheduler].fields.keys()
        world.close()
    found[Scheduler] &= SCHEMA[Scheduler].fields.keys() | vars(Scheduler(SchedulerConfig())).keys()
    assert found.pop(SwappedKv) == {"lane", "blocks", "computed"}
    for kind, names in found.items():
        if kind.__module__.startswith("scheduler_svc.core"):
            assert names == SCHEMA[kind].fields.keys(), f"state_schema.py knows other fields of {kind.__name__}"
    assert {kind for kind in found if kind.__module__.startswith("scheduler_svc.core")} == SCHEMA.keys()


def test_the_schema_names_every_class_of_the_core_that_has_state() -> None:
    kinds = set()
    for module in pkgutil.iter_modules(scheduler_svc.core.__path__, "scheduler_svc.core."):
        for _, kind in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            if kind.__module__ == module.name and not issubclass(kind, Enum | Exception):
                kinds.add(kind)
    with_state = {kind for kind in kinds if is_dataclass(kind) or "__init__" in vars(kind)}
    with_state = {kind for kind in with_state if not getattr(kind, "_is_protocol", False)}
    assert {kind.__name__ for kind in with_state} - TRANSIENT == {kind.__name__ for kind in SCHEMA}


@pytest.mark.parametrize("name", CONFIGS)
def test_each_segment_plays_by_itself_to_the_same_plans(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world = wander(RecordedWorld(tmp_path, CONFIGS[name]), 7, 400, segment_every=41)
    player = Player(world.close())
    steps = list(player.steps())
    assert [step.kind for step in steps].count(Kind.STATE) == 1 and len(player.segments) == 10
    assert player.num_iterations == len(world.plans) > 50
    alone = []
    for segment in player.segments:
        part = Player(segment.path)
        alone += [encode(step.plan) for step in part.steps() if step.plan is not None]
    assert alone == [encode(plan) for plan in world.plans]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_restored_state_is_the_same_state(name: str, tmp_path: Path) -> None:
    world = wander(RecordedWorld(tmp_path, CONFIGS[name]), 3, 300)
    for seed in range(100):
        if world.scheduler.live and world.out:
            break
        wander(world, seed, 3)
    state = pack_state(world.scheduler)
    restored = unpack_state(CONFIGS[name], state)
    assert restored.live and any(lane.in_flight is not None for lane in restored.lanes.values())
    restored.check_invariants()
    assert pack_state(restored) == state and compare_states(state, pack_state(restored)) == ""
    world.close()


def test_a_state_that_is_larger_than_a_block_is_in_the_first_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "BLOCK_BYTES", 64)
    world = eventful(RecordedWorld(tmp_path))
    world.begin_segment()
    player = Player(world.close())
    list(player.steps())
    assert player.num_iterations == len(world.plans) and len(player.segments) == 2


def test_what_the_oldest_segments_held_is_not_needed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world = wander(RecordedWorld(tmp_path), 5, 200, segment_every=50)
    wander(world, 6, 30)
    world.close()
    for path in sorted(tmp_path.iterdir())[:3]:
        path.unlink()
    assert main([str(tmp_path)], "gilir replay") == 0
    assert "identical" in capsys.readouterr().out


def test_segments_that_are_deleted_meanwhile_are_passed_over(tmp_path: Path) -> None:
    world = wander(RecordedWorld(tmp_path), 5, 200, segment_every=50)
    player = Player(world.close())
    for place in (0, 2):
        player.segments[place].path.unlink()
    steps = list(player.steps())
    assert [step.kind for step in steps].count(Kind.STATE) == 2
    assert 0 < player.num_iterations < len(world.plans)


def test_a_state_that_is_not_reached_is_a_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = eventful(RecordedWorld(tmp_path))
    world.begin_segment()
    world.close()
    monkeypatch.setattr(DrainRate, "note", lambda *_, **__: None)
    with pytest.raises(Difference, match=r"part 1 of the log begins: scheduler\._drain_rate\[1\]\.mean_gap_s: "):
        list(Player(tmp_path).steps())


def test_a_state_of_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = pack_state(Scheduler(SchedulerConfig()))
    monkeypatch.setitem(SCHEMA, Scheduler, Record({"more": Plain(), **SCHEMA[Scheduler].fields}))
    with pytest.raises(FormatError, match=r"another version of Gilir \(state that differs: Scheduler: more\)"):
        unpack_state(SchedulerConfig(), state)
