"""The plan log: a recorded run plays again to the same plans, byte for byte; files that are cut or damaged."""

from __future__ import annotations

import inspect
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from common.wire import Plan, Result, decode, encode
from scheduler_svc.core import LaneError, Scheduler
from scheduler_svc.plan_log import PlanLog, RecordedScheduler, recorder
from scheduler_svc.plan_log.format import FormatError, Kind
from scheduler_svc.plan_log.player import Player
from scheduler_svc.plan_log.reader import frames, iterations, rows
from scheduler_svc.plan_log.replay import main
from tests.core.model_executor import card
from tests.core.totals import totals
from tests.scheduler.recorded import RecordedWorld, eventful

QUESTIONS = {"why", "waiting_by_reason", "check_invariants"}
"""Public methods that change nothing."""


@pytest.fixture
def world(tmp_path: Path) -> RecordedWorld:
    return RecordedWorld(tmp_path / "log")


def test_every_verb_of_the_core_is_recorded() -> None:
    verbs = {name for name, value in vars(Scheduler).items() if inspect.isfunction(value) and name[0] != "_"}
    assert verbs - QUESTIONS - vars(RecordedScheduler).keys() == set()


def test_a_run_plays_again_to_the_same_plans(world: RecordedWorld, capsys: pytest.CaptureFixture[str]) -> None:
    eventful(world)
    assert totals(world.scheduler).preemptions and world.scheduler.counters.ended["REJECTED"]
    player = Player(world.close())
    messages = [message for step in player.steps() for message in step.messages]
    assert player.num_iterations == len(world.plans)
    assert player.scheduler.counters.ended == world.scheduler.counters.ended
    assert sum(len(m.tokens) for _, m in messages if hasattr(m, "tokens")) == sum(
        len(stream.tokens) for stream in world.streams.values()
    )
    assert main([str(world.folder)], "gilir replay") == 0
    assert capsys.readouterr().out == f"replayed {len(world.plans)} iterations, 18 requests: identical\n"


def test_the_log_holds_each_plan_as_it_was_sent(world: RecordedWorld) -> None:
    eventful(world)
    held = [frame.arguments[1] for frame in frames(world.close()) if frame.kind is Kind.PLAN]
    assert held == [encode(plan) for plan in world.plans]


def test_a_plan_is_encoded_once(world: RecordedWorld) -> None:
    lane = world.attach()
    world.submit(5)
    plan = world.scheduler.plan(lane, 1.0)
    assert plan is not None and isinstance(world.scheduler, RecordedScheduler)
    data = world.scheduler.encoded(plan)
    assert data == encode(plan) and world.scheduler.encoded(plan) is data
    assert world.scheduler.encoded(replace(plan, iteration=9)) == encode(replace(plan, iteration=9))
    world.close()


def test_a_verb_within_a_verb_is_no_input(world: RecordedWorld) -> None:
    world.attach()
    world.submit(5, owner=3)
    world.abort_owner(3)
    kinds = [frame.kind for frame in frames(world.close())]
    assert Kind.ABORT_OWNER in kinds and Kind.ABORT not in kinds


def test_what_a_verb_raised_must_come_again(world: RecordedWorld) -> None:
    lane = world.attach()
    world.submit(5)
    plan = world.plan(lane)
    assert plan is not None
    wrong = Result(plan.epoch, plan.iteration, np.empty(0, np.int32), np.empty(0, np.uint8))
    with pytest.raises(LaneError):
        world.scheduler.apply(lane, wrong, world.now)
    world.lose(lane)
    steps = list(Player(world.close()).steps())
    assert [step.kind for step in steps if step.raised] == [Kind.APPLY]
    assert steps[-1].kind is Kind.DETACH and not steps[-1].raised


def test_a_fault_of_the_core_is_in_the_log(world: RecordedWorld) -> None:
    lane = world.attach()
    world.submit(5)
    world.plan(lane)
    with pytest.raises(AssertionError):
        world.scheduler.plan(lane, world.now)  # an iteration is in flight
    last = list(Player(world.close()).steps())[-1]
    assert last.kind is Kind.NO_PLAN and last.raised.startswith("AssertionError")


def test_tokenizers_are_not_kept_but_still_compared(world: RecordedWorld) -> None:
    files = {"tokenizer.json": b"t" * 50_000}
    model = replace(card(), tokenizer_files=files)
    world.attach(model=model)
    for other in (b"u" * 50_000, b"t"):
        with pytest.raises(Exception, match="tokenizer"):
            world.attach(model=replace(model, tokenizer_files={"tokenizer.json": other}))
    world.attach(model=replace(model))
    assert sum(path.stat().st_size for path in world.close().iterdir()) < 2000
    player = Player(world.folder)
    raised = [step.raised.split(":")[0] for step in player.steps() if step.kind is Kind.ATTACH]
    assert raised == ["", "AttachError", "AttachError", ""]
    (kept,) = player.scheduler.availability.models["m"].tokenizer_files.values()
    assert len(kept) == 50_000
    assert sum(frame.kind is Kind.CARD for frame in frames(world.folder)) == 3


@pytest.mark.parametrize("cut", [1, 11, 13, 40])
def test_a_log_that_was_cut_plays_as_far_as_it_goes(
    world: RecordedWorld, cut: int, capsys: pytest.CaptureFixture[str]
) -> None:
    eventful(world)
    (path,) = world.close().iterdir()
    path.write_bytes(path.read_bytes()[:-cut])
    assert main([str(world.folder)], "gilir replay") == 0
    printed = capsys.readouterr().out
    assert "ends within a block" in printed and "identical" in printed


def test_a_damaged_block_is_named(world: RecordedWorld, capsys: pytest.CaptureFixture[str]) -> None:
    eventful(world)
    (path,) = world.close().iterdir()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255
    path.write_bytes(data)
    assert main([str(path)], "gilir replay") == 2
    assert f"{path}: a damaged block" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"gilir", b"{}\n" * 100, b"gilirlog" + bytes(40)])
def test_what_is_no_log_is_refused(tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x").write_bytes(content)
    assert main([str(tmp_path / "x")], "gilir replay") == 2
    assert str(tmp_path / "x") in capsys.readouterr().err
    assert main([str(tmp_path)], "gilir replay") == 2
    assert main([str(tmp_path / "nothing")], "gilir replay") == 2


def test_the_time_of_the_core_comes_back_bit_for_bit(world: RecordedWorld) -> None:
    moments = [0.1 + 0.2, 1e9 / 3, 1e9 / 3 + 2e-7]
    for now in moments:
        world.scheduler.expire(now)
    assert [frame.now for frame in frames(world.close()) if frame.kind is Kind.EXPIRE] == moments


def test_rows_tell_who_was_in_each_iteration(tmp_path: Path) -> None:
    world = RecordedWorld(tmp_path, long_prefill_threshold=100)
    world.attach(budget=6)
    world.submit(4, 2, ignore_eos=True)
    world.submit(8, 1)
    world.run()
    records = list(rows(world.close()))
    assert [(r["iteration"], r["decodes"], r["prefills"]) for r in records if "decodes" in r] == [
        (1, [], [[0, "r0/0", 4], [1, "r1/1", 2]]),
        (2, [[0, "r0/0"]], [[1, "r1/1", 5]]),
        (3, [], [[1, "r1/1", 1]]),
    ]
    assert [r["finished"] for r in records if "finished" in r] == [0, 1, 1]


def test_iterations_tell_what_each_one_cost(tmp_path: Path) -> None:
    world = RecordedWorld(tmp_path, long_prefill_threshold=100)
    world.attach(budget=6)
    world.submit(4, 2, ignore_eos=True)
    world.submit(8, 1)
    world.run()
    samples = list(iterations(world.close()))
    assert [(s.decodes, s.prefill_tokens, s.decode_context, s.prefill_attention) for s in samples] == [
        (0, 6, 0, 4 * 2 + 2 * 1),
        (1, 5, 5, 5 * (2 + 2.5)),
        (0, 1, 0, 7.5),
    ]
    assert [s.iteration for s in samples] == [1, 2, 3]
    assert all(s.seconds == pytest.approx(0.01) for s in samples)


def test_a_full_disk_ends_the_log_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = PlanLog(tmp_path / "log")
    world = RecordedWorld(tmp_path / "log", log=log)

    def full(_frames: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(log, "_write_block", full)
    eventful(world)
    log.flush()
    log._thread.join(60)
    assert log.closed
    eventful(world)
    world.close()


def settle(log: PlanLog) -> None:
    """Wait until the thread has taken what was handed to it."""
    deadline = time.monotonic() + 60
    while not log._queue.empty() and time.monotonic() < deadline:
        time.sleep(0.001)


def test_full_segments_are_followed_by_new_ones_and_the_oldest_go(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = PlanLog(tmp_path, segment_bytes=1500, max_segments=3)
    world = RecordedWorld(tmp_path, log=log)
    world.attach()
    for _ in range(30):
        world.submit(9, 12, ignore_eos=True)
        world.iterate()
        log.flush()
        settle(log)
    world.run()
    world.close()
    files = sorted(path.name for path in tmp_path.iterdir())
    assert len(files) == 3 and int(files[0].removeprefix("segment-").split(".")[0]) > 1
    assert main([str(tmp_path)], "gilir replay") == 0
    assert 3 < int(capsys.readouterr().out.split()[1]) < len(world.plans)


def test_a_snapshot_that_fails_ends_the_log_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(_scheduler: Scheduler) -> bytes:
        raise AttributeError("no such field")

    monkeypatch.setattr(recorder, "pack_state", faulty)
    log = PlanLog(tmp_path, segment_bytes=100)
    world = RecordedWorld(tmp_path, log=log)
    log.flush()
    settle(log)
    eventful(world)
    assert log.closed
    world.close()


def test_a_log_is_for_its_owner_only(world: RecordedWorld) -> None:
    (path,) = world.close().iterdir()
    assert path.stat().st_mode & 0o777 == 0o600 and world.folder.stat().st_mode & 0o777 == 0o700


def test_another_run_goes_into_another_file(world: RecordedWorld, tmp_path: Path) -> None:
    eventful(world)
    world.close()
    again = RecordedWorld(world.folder, first_epoch=50)
    eventful(again)
    again.close()
    player = Player(world.folder)
    assert [step.kind for step in player.steps()].count(Kind.STATE) == 2
    assert player.num_iterations == len(world.plans) + len(again.plans) and len(player.segments) == 2


def test_plans_are_the_messages_that_went_out(world: RecordedWorld) -> None:
    eventful(world)
    played = [step.plan for step in Player(world.close()).steps() if step.plan is not None]
    assert played == world.plans and all(isinstance(decode(encode(plan)), Plan) for plan in played)
    with pytest.raises(FormatError):
        Player(world.folder / "missing")
