"""`gilir trace`: a trace that Perfetto takes, with everyone in one seat at a time."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from scheduler_svc.plan_log.trace import main
from tests.core.totals import totals
from tests.scheduler.recorded import RecordedWorld, eventful

Event = dict[str, Any]


def trace(world: RecordedWorld) -> list[Event]:
    output = world.close() / "trace.json"
    assert main([str(world.folder), "--output", str(output)], "gilir trace") == 0
    document = json.loads(output.read_text())
    assert document["displayTimeUnit"] == "ms"
    return list(document["traceEvents"])


@pytest.fixture
def world(tmp_path: Path) -> RecordedWorld:
    return eventful(RecordedWorld(tmp_path))


def names(events: list[Event]) -> dict[tuple[int, int], str]:
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}


def test_every_event_has_what_its_phase_asks_for(world: RecordedWorld) -> None:
    events = trace(world)
    assert {event["ph"] for event in events} == {"M", "X", "i", "C"}
    for event in events:
        assert event["name"] and type(event["pid"]) is int and type(event["tid"]) is int
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
        if event["ph"] == "i":
            assert event["s"] in "tp"
        if event["ph"] == "C":
            assert event["args"] and all(type(value) is int for value in event["args"].values())
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(processes.values()) == ["scheduler", *(f"executor executor-{i}" for i in range(3))]
    used = {(e["pid"], e["tid"]) for e in events if e["ph"] in "Xi"}
    assert used <= names(events).keys()


def test_slices_of_a_thread_follow_one_another(world: RecordedWorld) -> None:
    threads = defaultdict(list)
    for event in trace(world):
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for slices in threads.values():
        slices.sort()
        for (_, ended), (begun, _) in pairwise(slices):
            assert begun >= ended - 0.002


def test_each_iteration_and_each_row_is_there_once(world: RecordedWorld) -> None:
    events = trace(world)
    seats = names(events)
    slices = [e for e in events if e["ph"] == "X"]
    iterations = [e for e in slices if seats[e["pid"], e["tid"]] == "iterations"]
    assert len(iterations) == len(world.plans)
    assert sum("(lost)" in e["name"] for e in iterations) == 1
    rows = [e for e in slices if seats[e["pid"], e["tid"]] != "iterations"]
    lost = next(plan for plan in world.plans if (plan.epoch, plan.iteration) == (2, 5))
    assert sum(e["args"]["iterations"] for e in rows if "iterations" in e["args"]) == sum(
        len(plan.decodes) for plan in world.plans
    ) - len(lost.decodes)
    assert sum(e["args"]["tokens"] for e in rows if "tokens" in e["args"]) == sum(
        int(plan.prefill_lengths.sum()) for plan in world.plans
    ) - int(lost.prefill_lengths.sum())
    first = next(e for e in rows if e["name"] == "r0/0 prefill")
    assert (first["ts"], first["dur"]) == pytest.approx((10_000, 10_000))


def test_instants_tell_who_came_went_and_moved(world: RecordedWorld) -> None:
    instants = [e for e in trace(world) if e["ph"] == "i"]
    words = [e["name"] for e in instants]
    assert words.count("admitted") == sum(len(plan.new) for plan in world.plans)
    assert words.count("preempted") == totals(world.scheduler).preemptions
    assert {"failover", "moved", "attached", "detached"} <= set(words)
    assert next(e for e in instants if e["name"] == "detached")["args"]["reason"] == "it broke"


def test_counters_return_to_zero(world: RecordedWorld) -> None:
    last: dict[tuple[int, str], Event] = {}
    for event in trace(world):
        if event["ph"] == "C":
            last[event["pid"], event["name"]] = event["args"]
    assert {name for _, name in last} == {"waiting", "running", "KV blocks used", "tokens in the iteration"}
    assert last[1, "waiting"].keys() <= {"policy", "kv_blocks", "seats", "token_budget", "no_executor", "paused"}
    assert not any(last[1, "waiting"].values())


def test_runs_in_one_folder_follow_one_another(world: RecordedWorld) -> None:
    world.close()
    eventful(RecordedWorld(world.folder, first_epoch=9)).close()
    events = trace(world)
    starts = [e["ts"] for e in events if e["name"] == "iteration 1"]
    assert len(starts) == 6 and starts[3] > 0


def test_a_log_that_was_cut_makes_a_whole_trace(world: RecordedWorld) -> None:
    (path,) = world.close().iterdir()
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    events = trace(world)
    assert len(events) > 10 and events[-1]["ts"] >= 0


def test_an_unreadable_log_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none"), "--output", str(tmp_path / "t")], "gilir trace") == 2
    assert "there is no such file" in capsys.readouterr().err
