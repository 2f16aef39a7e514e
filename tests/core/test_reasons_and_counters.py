"""What is told of a plan: why somebody is not in it, and what is counted."""

from __future__ import annotations

import numpy as np
import pytest

from common.wire import EndReason
from scheduler_svc.core import WaitReason
from scheduler_svc.core.counters import Histogram, ModelCounters
from tests.core.stream import whole
from tests.core.world import World

# --- reasons ---


def test_why_a_sequence_waits() -> None:
    world = World()
    lane = world.attach(blocks=16, seats=2, budget=16)
    big, second = (world.submit(20, 4)[0] for _ in range(2))
    third, fourth = (world.submit(4, 4)[0] for _ in range(2))
    why = {stream: world.scheduler.why(world.sequence(stream)) for stream in (big, second, third, fourth)}
    assert set(why.values()) == {WaitReason.POLICY}, "not looked at yet"
    world.turn()
    names = ("big", "second", "third", "fourth")
    why = {
        name: world.scheduler.why(world.sequence(stream))
        for name, stream in zip(names, (big, second, third, fourth), strict=True)
    }
    assert why == {
        "big": WaitReason.NONE,
        "second": WaitReason.SEATS,  # as everybody
        "third": WaitReason.NONE,  # passes it
        "fourth": WaitReason.SEATS,
    }
    world.abort(third)
    world.deliver(lane)
    world.turn()
    assert world.scheduler.why(world.sequence(fourth)) is WaitReason.NONE
    world.deliver(lane)
    world.run()


def test_why_blocks_and_tokens_are_named() -> None:
    world = World(long_prefill_threshold=100)
    lane = world.attach(blocks=8, budget=8)
    first = world.submit(20, 2)[0]
    next_one = world.submit(20, 2)[0]
    world.turn()
    assert world.scheduler.why(world.sequence(next_one)) is WaitReason.TOKEN_BUDGET
    while world.scheduler.why(world.sequence(next_one)) is WaitReason.TOKEN_BUDGET:
        world.deliver(lane)
        world.turn()
    assert world.scheduler.why(world.sequence(next_one)) is WaitReason.KV_BLOCKS and not first.over
    world.deliver(lane)
    world.run()


def test_a_seated_sequence_that_gets_no_chunk_waits_for_tokens() -> None:
    world = World(long_prefill_threshold=100)
    lane = world.attach(budget=8)
    low = world.submit(20, 2, priority=1)[0]
    world.iterate()
    world.submit(20, 2)
    world.iterate()
    world.turn()
    starved = [s for s in lane.running() if world.scheduler.why(s) is WaitReason.TOKEN_BUDGET]
    in_plan = world.members(lane)
    assert all(s.stream not in in_plan for s in starved)
    assert low.number in in_plan or world.sequence(low) in starved
    world.deliver(lane)
    world.run()


def test_waiting_by_reason_counts_everybody() -> None:
    world = World()
    lane = world.attach(seats=1)
    for _ in range(4):
        world.submit(4, 4)
    world.turn()
    assert dict(world.scheduler.waiting_by_reason()) == {WaitReason.SEATS: 3}
    world.lose(lane)
    assert +world.scheduler.waiting_by_reason() == {WaitReason.NO_EXECUTOR: 4}


# --- counters ---


def model_counters(world: World) -> ModelCounters:
    (queue,) = world.scheduler.queues.values()
    return queue.counters


def test_gaps_between_tokens_are_measured_from_the_last_token() -> None:
    world = World()
    lane = world.attach()
    world.submit(4, 5, ignore_eos=True)
    world.now += 7.0
    world.iterate()  # first token
    for gap in (0.5, 0.25):
        world.now += gap
        world.iterate()
    world.lose(lane)
    world.now += 3.0
    world.attach()
    world.iterate()  # the pause counts
    world.now += 0.125
    world.iterate()
    world.submit(4, 2, ignore_eos=True)  # takes a used slot: its own first gap only
    world.iterate()
    world.now += 1.0
    world.iterate()
    *cumulative, total = model_counters(world).inter_token_latency.cumulative()
    assert cumulative[-1] == 5 and total == pytest.approx(0.5 + 0.25 + 3.0 + 0.125 + 1.0)
    *cumulative, total = model_counters(world).time_to_first_token.cumulative()
    assert cumulative[-1] == 2 and total == pytest.approx(7.0)


def test_a_histogram_tells_what_it_holds_whenever_it_is_asked() -> None:
    histogram = Histogram((1.0, 2.0))
    assert histogram.cumulative() == (0, 0, 0, 0)
    histogram.observe(1.5, 2)
    assert histogram.cumulative() == histogram.cumulative() == (0, 2, 2, 3.0)
    histogram.observe_all(np.array([0.5, 9.0]))
    assert histogram.cumulative() == (1, 3, 4, 12.5)


def test_counters_count_prompts_once_and_hits_at_the_first_admission() -> None:
    world = World()
    world.attach(blocks=40, seats=1)
    (low,) = world.submit(16, 9, priority=1, ignore_eos=True)
    for _ in range(3):
        world.iterate()
    (high,) = world.submit([*low.prompt[:12], 3, 3], 2, ignore_eos=True)
    world.run()
    counters = model_counters(world)
    assert counters.prompt_tokens == 16 + 14 and counters.generation_tokens == 9 + 2
    assert counters.preemptions == 1 and (counters.prefix_queries, counters.prefix_hits) == (30, 12)
    assert dict(counters.ended) == {EndReason.LENGTH.name: 2} and whole(low, high)
    assert world.scheduler.counters.iterations == len(world.plans)
    *cumulative, total = counters.iteration_tokens.cumulative()
    assert cumulative[-1] == len(world.plans)
    assert total == sum(len(plan.decodes) + int(np.sum(plan.prefill_lengths)) for plan in world.plans)
