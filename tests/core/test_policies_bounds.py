"""What once went on for ever, or hit the innocent: each with the load that showed it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from common.wire import EndReason, PromptLogprobs
from scheduler_svc.core import LaneError, WaitReason
from scheduler_svc.core.config import Admission, Discipline, KvLayout, Prefill
from scheduler_svc.core.pacing import Pace
from scheduler_svc.core.planner import MAX_PREFILLS_IN_A_ROW
from tests.core.model_executor import card
from tests.core.stream import whole
from tests.core.totals import totals
from tests.core.world import World


def test_decodes_stand_aside_for_a_bounded_time_where_answers_end_with_their_prefill() -> None:
    """Answers of one token leave their seats at once, so the seats never fill: the victim once stood still for ever."""
    world = World(prefill=Prefill.SEPARATE)
    world.attach(seats=8, budget=16, blocks=64)
    (victim,) = world.submit(4, 6, ignore_eos=True)
    for _ in range(6 * (MAX_PREFILLS_IN_A_ROW + 1)):
        world.submit(12, 1)
        world.iterate()
    assert whole(victim)


def test_of_a_hundred_suspects_the_guilty_one_alone_ends() -> None:
    world = World(max_strikes=4)
    model = card(max_len=48)
    world.attach(blocks=1000, seats=128, budget=1024, model=model)
    streams = [world.submit(4, 3, ignore_eos=True)[0] for _ in range(100)]
    guilty = streams[60]
    for _ in range(400):
        if not world.lanes:
            world.attach(blocks=1000, seats=128, budget=1024, model=model)
        lane = world.lanes[0]
        if world.plan(lane) is None:
            break
        if guilty.number in world.members(lane):
            world.lose(lane)
        else:
            world.deliver(lane)
    assert guilty.ended is not None and guilty.ended.reason == EndReason.FAILED
    assert whole(*[stream for stream in streams if stream is not guilty])


def test_who_is_preempted_again_and_again_rises_too() -> None:
    """A better class comes every 2 s and takes the only seat for 1.7 s; ageing, of 5 s, once began anew each time."""
    world = World(discipline=Discipline.PRIORITY, ageing_s=5.0, prefix_caching=False)
    lane = world.attach(seats=1, budget=4, blocks=64)
    (low,) = world.submit(30, 2, priority=1, ignore_eos=True)
    for i in range(400):
        if i % 20 == 1:
            world.submit(4, 17, priority=0, ignore_eos=True)
        world.now += 0.1
        world.iterate()
        if low.ended is not None:
            break
    assert whole(low) and world.now < 100 + 2 * 5 + 4
    assert lane.seats == 1


def test_the_fit_of_prefill_outlives_a_long_stretch_of_decodes() -> None:
    pace = Pace()
    seconds = lambda decodes, prefill: 0.004 + 0.0001 * decodes + 0.0002 * prefill  # noqa: E731
    for i in range(60):
        pace.observe(8, 40 * (i % 3), seconds(8, 40 * (i % 3)), fit=True)
    for i in range(5000):
        pace.observe(8 + i % 5, 0, seconds(8 + i % 5, 0), fit=True)
    assert pace.prefill_tokens(8, 2048, 0.02) == pytest.approx(76, abs=2)


def test_without_any_prefill_seen_the_guess_is_cautious() -> None:
    pace = Pace()
    for _ in range(100):
        pace.observe(8, 0, 0.005, fit=True)
    assert pace.prefill_tokens(8, 2048, 0.02) == 512


def test_answers_that_were_cut_teach_no_length() -> None:
    world = World(admission=Admission.PREDICTED)
    world.attach()
    for _ in range(40):
        world.submit(4, 1, ignore_eos=True)
        world.run()
    lengths = world.scheduler.queues["m"].lengths
    assert lengths.predict("", 0, 200) == 200, "nothing was learned"
    for _ in range(40):
        world.submit(4, 30)
        world.run()
    assert lengths.predict("", 0, 200) < 31


def test_a_small_lane_is_not_held_up_by_what_only_a_large_one_can_hold() -> None:
    world = World(long_prefill_threshold=1000)
    small, large = world.attach(blocks=8), world.attach(blocks=400, seats=4, budget=256)
    for _ in range(44):
        world.submit(33, 9, ignore_eos=True)
    tiny = [world.submit(4, 4, ignore_eos=True)[0] for _ in range(8)]
    world.turn()
    assert small.num_running >= 2 and large.num_running == 4
    assert any(world.sequence(stream).lane is small for stream in tiny)


def test_under_contiguous_kv_a_better_class_gets_a_run_from_a_lower_one() -> None:
    world = World(kv=KvLayout.CONTIGUOUS)
    world.attach(blocks=12, seats=8)
    low = [world.submit(4, 20, priority=5, ignore_eos=True)[0] for _ in range(2)]
    world.iterate()
    (high,) = world.submit(4, 20, ignore_eos=True)
    world.iterate()
    assert len(high.tokens) == 1 and totals(world.scheduler).preemptions == 1
    world.run()
    assert whole(*low, high)


def test_a_drain_moves_only_those_who_find_room() -> None:
    world = World()
    leaving = world.attach(blocks=64, seats=4)
    moved = [world.submit(4, 20, ignore_eos=True)[0] for _ in range(3)]
    world.iterate()
    other = world.attach(blocks=64, seats=1)
    world.drain(leaving)
    assert leaving.num_running == 2 and other.num_running == 0
    world.run()
    assert whole(*moved)


def test_recomputed_tokens_are_those_computed_twice() -> None:
    world = World(prefix_caching=False)
    lane = world.attach(blocks=64)
    (stream,) = world.submit(12, 20, ignore_eos=True)
    for _ in range(4):
        world.iterate()
    world.lose(lane)
    world.attach(blocks=64)
    world.run()
    assert whole(stream) and world.scheduler.counters.recomputed_tokens == 15


def test_timers_go_with_the_sequences_that_they_were_for() -> None:
    world = World(discipline=Discipline.DEADLINE)
    world.attach(seats=1)
    world.submit(4, 20, ignore_eos=True)
    world.iterate()
    for _ in range(1000):
        world.abort(*world.submit(4, 4, deadline_ms=(1 << 31) - 1))
    assert len(world.scheduler.queues["m"]._timers) < 100


@pytest.mark.parametrize("budget", [64, 2], ids=["beside a token", "alone"])
def test_prompt_logprobs_that_nobody_asked_for_end_the_epoch(budget: int) -> None:
    world = World(max_num_batched_tokens=budget)
    lane = world.attach()
    world.submit(4, 4)
    world.turn()
    result = world.out[lane.epoch].result
    empty = np.empty(0, np.int32)
    part = PromptLogprobs(0, 9999, np.empty(0, np.uint16), empty, np.empty(0, np.float32))
    with pytest.raises(LaneError, match="prompt logprobs"):
        world.scheduler.apply(lane, replace(result, prompt_logprobs=(part,)), world.now)
    assert world.scheduler.why(next(iter(world.scheduler.live.values()))) is WaitReason.NONE
