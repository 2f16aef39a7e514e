"""How long the steps of a sequence took, as its frontend and the metrics are told; bubbles, failovers, refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.wire import EndReason, SequenceTimes
from scheduler_svc.core.counters import Histogram, ModelCounters
from tests.core.stream import Stream
from tests.core.world import World


def counters_of(world: World) -> ModelCounters:
    (queue,) = world.scheduler.queues.values()
    return queue.counters


def times_of(stream: Stream) -> SequenceTimes:
    assert stream.ended is not None
    return stream.ended.times


def observed(histogram: Histogram) -> tuple[float, float]:
    """Count and sum."""
    *counts, total = histogram.cumulative()
    return counts[-1], pytest.approx(total)


def iterate(world: World, seconds: float) -> None:
    """One iteration that takes so long."""
    world.turn()
    world.now += seconds
    for lane in world.lanes:
        world.deliver(lane)


def test_queue_prefill_and_decode_make_the_whole() -> None:
    world = World()
    world.attach()
    (stream,) = world.submit(4, 3, ignore_eos=True)
    world.now += 1.0
    iterate(world, 2.0)
    iterate(world, 0.25)
    iterate(world, 0.5)
    assert stream.over and times_of(stream) == SequenceTimes(1_000_000, 2_000_000, 750_000)
    counters = counters_of(world)
    assert observed(counters.queue_time) == (1, 1.0) and observed(counters.prefill_time) == (1, 2.0)
    assert observed(counters.decode_time) == (1, 0.75) and observed(counters.inference_time) == (1, 2.75)
    assert observed(counters.e2e_latency) == (1, 3.75) and observed(counters.time_per_output_token) == (1, 0.375)
    assert observed(counters.request_prompt_tokens) == (1, 4) and observed(counters.request_generation_tokens) == (1, 3)


def test_an_answer_of_one_token_has_no_time_between_tokens() -> None:
    world = World()
    world.attach()
    (stream,) = world.submit(4, 1, ignore_eos=True)
    iterate(world, 2.0)
    assert times_of(stream) == SequenceTimes(0, 2_000_000, 0)
    assert observed(counters_of(world).time_per_output_token) == (0, 0.0)


def test_who_never_had_a_seat_only_waited() -> None:
    world = World(hold_s=5.0)
    world.lose(world.attach())
    (stream,) = world.submit(4, 3)
    world.now += 6.0
    world.expire()
    assert stream.ended is not None and stream.ended.reason == EndReason.NO_EXECUTOR
    assert times_of(stream) == SequenceTimes(queue_us=6_000_000)


def test_a_failover_is_over_with_the_next_token() -> None:
    world = World()
    lane = world.attach()
    (stream,) = world.submit(4, 3, ignore_eos=True)
    iterate(world, 1.0)
    world.lose(lane)
    world.now += 4.0
    world.attach()
    iterate(world, 0.5)
    counters = counters_of(world)
    assert counters.failovers == 1 and observed(counters.recovery_time) == (1, 4.5)
    world.run()
    assert times_of(stream).num_failovers == 1 and observed(counters.recovery_time) == (1, 4.5)
    lane = world.lanes[0]
    world.submit(4, 3)
    iterate(world, 1.0)
    world.lose(lane, reason="")
    assert counters.failovers == 1, "a lane that leaves is not lost"


def test_of_a_requests_answers_the_longest_counts_once() -> None:
    world = World()
    world.attach()
    world.submit(4, 5, n=3, ignore_eos=True)
    world.submit(4, 2, ignore_eos=True)
    world.run()
    counters = counters_of(world)
    assert observed(counters.request_longest_generation) == (2, 7)
    assert observed(counters.request_generation_tokens) == (4, 17)
    assert observed(counters.request_n) == (2, 4) and observed(counters.request_max_tokens) == (2, 7)


def test_the_longest_answer_counts_though_its_siblings_are_aborted_after_it() -> None:
    world = World()
    world.attach()
    whole, *aborted = world.submit(4, 9, n=3, ignore_eos=True)
    iterate(world, 1.0)
    iterate(world, 1.0)
    world.scheduler.abort(0, [whole.number], world.now, stopped=True)
    iterate(world, 1.0)
    for stream in aborted:
        assert observed(counters_of(world).request_longest_generation) == (0, 0)
        world.scheduler.abort(0, [stream.number], world.now)
    assert observed(counters_of(world).request_longest_generation) == (1, 2), "no answer is what was aborted"


def test_a_bubble_is_idle_time_before_an_iteration_whose_rows_were_running() -> None:
    world = World()
    lane = world.attach()
    world.submit(4, 3, ignore_eos=True)
    for _ in range(3):
        world.turn()
        world.now += 1.0
        outing = world.out[lane.epoch]
        outing.result = replace(outing.result, busy_us=600_000)
        world.deliver(lane)
    counters = counters_of(world)
    assert counters.busy_s == pytest.approx(1.8) and counters.bubble_s == pytest.approx(2 * 0.4)
    assert counters.budget_tokens == 3 * lane.token_budget
    world.now += 100.0  # nothing ran
    world.submit(4, 1)
    iterate(world, 1.0)
    assert counters.bubble_s == pytest.approx(2 * 0.4)


def test_refusals_are_counted_apart_from_endings() -> None:
    world = World(max_waiting=1)
    world.attach(seats=1)
    world.submit(4, 3, ignore_eos=True)
    world.submit(4, 3, ignore_eos=True)
    world.run()
    counters = counters_of(world)
    assert counters.refused == {"QUEUE_FULL": 1} and counters.ended == {"LENGTH": 1}


def test_a_stop_string_ends_an_answer_and_an_abort_does_not() -> None:
    world = World()
    world.attach()
    stopped, left = (world.submit(4, 9, ignore_eos=True)[0] for _ in range(2))
    iterate(world, 1.0)
    iterate(world, 0.5)
    world.scheduler.abort(0, [stopped.number], world.now, stopped=True)
    world.scheduler.abort(0, [left.number], world.now)
    counters = counters_of(world)
    assert counters.ended == {"STOP_STRING": 1, "ABORTED": 1}
    assert observed(counters.e2e_latency) == (1, 1.5) and observed(counters.request_generation_tokens) == (1, 2)
    assert observed(counters.request_longest_generation) == (1, 2)
    (queue,) = world.scheduler.queues.values()
    assert queue.lengths._all.sum() == 1
    waiting = world.submit(4, 9)
    world.scheduler.abort(0, [waiting[0].number], world.now, stopped=True)
    assert observed(counters.e2e_latency)[0] == 1, "without a token there is no answer"
