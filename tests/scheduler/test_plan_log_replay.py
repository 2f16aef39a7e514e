"""`gilir replay`: what it says where a plan differs, and why a request waited."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from common.wire import Plan, SamplingParams
from scheduler_svc.core import Lane, Scheduler
from scheduler_svc.core.config import Handover
from scheduler_svc.core.handover import Course, Handovers
from scheduler_svc.plan_log.differences import compare_plans
from scheduler_svc.plan_log.format import Kind
from scheduler_svc.plan_log.replay import main
from tests.scheduler.recorded import RecordedWorld, eventful

Print = Callable[[], str]


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Print:
    return lambda: capsys.readouterr().out


def explain(world: RecordedWorld, request_id: str) -> int:
    return main([str(world.close()), "--explain", request_id], "gilir replay")


def test_another_decision_is_told_with_the_rows_that_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: Print
) -> None:
    world = RecordedWorld(tmp_path, long_prefill_threshold=100)
    world.attach(budget=8)
    world.submit(6, 3, ignore_eos=True)
    world.submit(6, 3, ignore_eos=True)
    world.run()
    world.close()
    plan = Scheduler.plan

    def hasty(scheduler: Scheduler, lane: Lane, now: float) -> Plan | None:
        made = plan(scheduler, lane, now)
        if made is None or made.iteration != 2:
            return made
        return replace(made, decodes=np.empty(0, np.uint16), prefill_lengths=made.prefill_lengths - 1)

    monkeypatch.setattr(Scheduler, "plan", hasty)
    assert main([str(tmp_path)], "gilir replay") == 1
    text = printed()
    assert text.startswith(
        "replayed 1 iterations, 2 requests: then a difference\nexecutor executor-0, iteration 2, at "
    )
    assert "decodes: 1 rows in the log, 0 replayed\n    only in the log: [slot 0 r0/0]" in text
    assert "slot 1 r1/1: 4 in the log, 3 replayed" in text


def test_a_fault_that_was_not_there_is_a_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: Print
) -> None:
    world = RecordedWorld(tmp_path)
    world.attach()
    world.submit(6, 3)
    world.run()
    world.close()

    def faulty(*_: object) -> None:
        raise AssertionError("a block is lost")

    monkeypatch.setattr(Scheduler, "apply", faulty)
    assert main([str(tmp_path)], "gilir replay") == 1
    assert "in the log: it went well\n  replayed: AssertionError: a block is lost" in printed()


def test_another_order_to_executors_is_a_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: Print
) -> None:
    world = RecordedWorld(tmp_path, handover=Handover.ALWAYS)
    source = world.attach(transfer=True)
    world.submit(10, 9, ignore_eos=True)
    world.iterate()
    world.attach(transfer=True)
    world.drain(source)
    world.run()
    assert world.scheduler.counters.handovers_done == 1
    assert main([str(world.close())], "gilir replay") == 0
    assert "identical" in printed()
    monkeypatch.setattr(Handovers, "consider", lambda *_: Course.RECOMPUTE)
    assert main([str(tmp_path)], "gilir replay") == 1
    assert re.search(r"no_plan at .* s\n  in the log: Lend\(.*Fetch\(.*\n  replayed: no orders", printed(), re.DOTALL)


def test_it_stops_where_it_is_told(tmp_path: Path, printed: Print) -> None:
    world = eventful(RecordedWorld(tmp_path))
    assert main([str(world.close()), "--until", "5"], "gilir replay") == 0
    assert int(printed().split()[1]) < len(world.plans)


def test_the_story_of_a_request_that_waited_for_blocks(tmp_path: Path, printed: Print) -> None:
    world = RecordedWorld(tmp_path, admission="immediate", prefix_caching=False)
    world.attach(blocks=6, block_size=4)
    world.submit(13, 6, ignore_eos=True)
    world.submit(12, 2, ignore_eos=True)
    world.submit(12, 2, ignore_eos=True)
    world.run()
    assert explain(world, "r1") == 0
    lines = [re.sub(r" +", " ", line.strip()) for line in printed().splitlines()]
    assert lines[0].startswith("r1/1: 12 prompt tokens, arrived ")
    assert lines[2] == "0.000 s 0.130 s executor-0 1-6 kv_blocks"
    assert lines[3] == "0.130 s 0.150 s executor-0 7 prefill"
    assert lines[4] == "0.150 s 0.160 s executor-0 8 decode"
    assert lines[5] == "0.160 s: length; 2 tokens, preempted 0 times"
    assert explain(world, "r2") == 0
    assert "policy" in printed()


def test_the_story_of_a_refused_an_unserved_and_an_unknown_request(tmp_path: Path, printed: Print) -> None:
    world = RecordedWorld(tmp_path)
    lane = world.attach()
    world.submit(100, 100)
    world.submit(5)
    world.lose(lane)
    world.now += 9
    world.scheduler.expire(world.now)
    assert explain(world, "r0") == 0
    assert "rejected: prompt and max_tokens make 200 tokens" in printed()
    assert explain(world, "r1") == 0
    text = printed()
    assert re.search(r"0\.000 s +9\.000 s +- +no_executor", text) and "the log ends here" in text
    assert explain(world, "cmpl-r1/1") == 0
    assert "no_executor" in printed()
    assert explain(world, "r7") == 1
    assert "there is no request 'r7' in this log" in printed()


def test_plans_are_compared_field_by_field() -> None:
    plan = Plan(1, 5, decodes=np.array([0, 1, 2], np.uint16), freed=np.array([4], np.uint16))
    other = replace(plan, iteration=6, decodes=np.array([0, 2, 1], np.uint16), freed=np.empty(0, np.uint16))
    text = compare_plans(plan, other, lambda slot: f"r{slot}/0")
    assert text.splitlines() == [
        "  freed: 1 rows in the log, 0 replayed",
        "    only in the log: [slot 4 r4/0]",
        "  iteration: 5 in the log, 6 replayed",
        "  decodes: another order from place 1 on",
    ]
    assert compare_plans(None, plan, str) == "  only the replay has a plan: [0 0, 1 1, 2 2]"
    many = replace(plan, decodes=np.arange(20, dtype=np.uint16))
    assert "… 17 in all" in compare_plans(plan, many, str)


def test_new_sequences_are_compared_field_by_field(tmp_path: Path) -> None:
    world = RecordedWorld(tmp_path)
    lane = world.attach()
    world.submit(5)
    plan = world.plan(lane)
    world.close()
    assert plan is not None
    (item,) = plan.new
    changed = replace(item, blocks=item.blocks + 1, computed=1, params=SamplingParams(max_tokens=1))
    text = compare_plans(plan, replace(plan, new=(changed,)), lambda slot: "r0/0")
    assert text.startswith("  new sequence in slot 0 r0/0: computed 0 in the log, 1 replayed, blocks [0, 1] in the log")
    assert text.endswith(", params")


def test_a_segment_without_its_end_is_a_damaged_log_and_no_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A later segment begins with the state that the missing frames led to."""
    world = RecordedWorld(tmp_path)
    world.attach()
    for _ in range(2):
        world.submit(6, 3)
        world.run()
        world.begin_segment()
    first = min(world.close().iterdir())
    first.write_bytes(first.read_bytes()[:-1])
    assert main([str(tmp_path)], "gilir replay") == 2
    told = capsys.readouterr()
    assert "segment-000001.planlog: its end is missing, though the log goes on" in told.err and not told.out


def test_a_frame_that_holds_no_message_is_a_damaged_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world = RecordedWorld(tmp_path)
    world.attach()
    world.log.write(world.now, Kind.SUBMIT, 0, b"junk")
    assert main([str(world.close())], "gilir replay") == 2
    assert "gilir replay: a frame that cannot be read" in capsys.readouterr().err
