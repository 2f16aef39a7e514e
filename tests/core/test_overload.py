"""How many may wait, and for how long a request may run."""

from __future__ import annotations

import pytest

from common.wire import EndReason
from scheduler_svc.core import Sequence
from tests.core.model_executor import card
from tests.core.stream import Stream, reason, whole
from tests.core.test_lanes import long_answers
from tests.core.totals import totals
from tests.core.world import World


def refusal(stream: Stream) -> tuple[EndReason, str, int]:
    assert stream.ended is not None and not stream.accepted
    return EndReason(stream.ended.reason), stream.ended.message, stream.ended.retry_after_s


# --- limits ---


def test_the_queue_takes_exactly_so_many_prompt_tokens() -> None:
    world = World(max_waiting_tokens=20)
    lane = world.attach(seats=1)
    world.submit(4, 3, ignore_eos=True)
    world.turn()
    (first,), (second,) = world.submit(8, 3), world.submit(12, 3)
    assert first.accepted and second.accepted
    (over,) = world.submit(1, 3)
    reason, text, retry_after_s = refusal(over)
    assert reason == EndReason.QUEUE_FULL and "20 of 20 prompt tokens" in text and retry_after_s >= 1
    world.abort(second)
    (again,) = world.submit(12, 3)
    assert again.accepted
    world.deliver(lane)
    world.run()
    world.check_idle()


def test_each_of_the_n_counts_and_what_never_fits_is_refused_for_good() -> None:
    world = World(max_waiting_tokens=20)
    world.attach()
    assert all(stream.accepted for stream in world.submit(5, 3, n=4))
    world.run()
    for streams in (world.submit(21, 3), world.submit(7, 3, n=3)):
        for stream in streams:
            reason, text, _ = refusal(stream)
            assert reason == EndReason.REJECTED and "at most 20 prompt tokens" in text
    world.check_idle()


def test_a_call_of_several_prompts_fits_whole_or_is_refused() -> None:
    world = World(max_waiting=4, max_waiting_tokens=20)
    world.attach(seats=1)
    assert all(stream.accepted for stream in world.submit_call([4, 4], 3))
    for lengths, text in (([1, 1, 1], "2 of 4 sequences"), ([6, 7], "8 of 20 prompt tokens")):
        for stream in world.submit_call(lengths, 3):
            assert refusal(stream)[0] == EndReason.QUEUE_FULL and text in refusal(stream)[1]
    for stream in world.submit_call([1, 1], 3, n=3):
        assert refusal(stream)[0] == EndReason.REJECTED and "6" in refusal(stream)[1]
    for stream in world.submit_call([3, 900], 3):
        assert refusal(stream)[0] == EndReason.REJECTED and not stream.accepted
    assert all(stream.accepted for stream in world.submit_call([6, 6], 3))
    world.run()
    world.check_idle()


def test_a_model_without_executors_fills_no_other_models_queue() -> None:
    world = World(max_waiting=2)
    world.lose(world.attach(model=card(name="idle")))
    world.attach(seats=1)
    stuck = [world.submit(4, 3, model="idle")[0] for _ in range(3)]
    assert [stream.accepted for stream in stuck] == [True, True, False]
    served = [world.submit(4, 3)[0] for _ in range(3)]
    assert [stream.accepted for stream in served] == [True, True, False]


def test_who_is_preempted_takes_no_place_of_the_queue() -> None:
    world = World(max_waiting=2, max_waiting_tokens=16)
    world.attach(blocks=12, seats=4)
    running = [stream for _ in range(2) for stream in world.submit(8, 20, ignore_eos=True)]
    while not totals(world.scheduler).preemptions:
        assert world.iterate()
    assert len(world.scheduler.queues["m"]) == 1
    late = [world.submit(8, 2)[0] for _ in range(3)]
    assert [stream.accepted for stream in late] == [True, True, False]
    world.run()
    assert all(len(stream.tokens) == 20 for stream in running)
    world.check_idle()


def test_the_wait_that_a_refusal_tells_follows_the_rate_of_endings() -> None:
    world = World(max_waiting=10)
    world.attach(seats=1)
    for _ in range(10):
        world.submit(4, 1, ignore_eos=True)
    for _ in range(40):
        world.now += 3.0
        world.iterate()
        world.submit(4, 1, ignore_eos=True)
    waiting = len(world.scheduler.queues["m"])
    (over,) = [stream for _ in range(11 - waiting) for stream in world.submit(4, 1) if not stream.accepted]
    assert refusal(over)[2] == pytest.approx(3.0 * 10, abs=2)


# --- time limits ---


def ended_in_time(stream: Stream) -> bool:
    return stream.ended is not None and stream.ended.reason == EndReason.TIMEOUT


def test_a_request_ends_when_its_time_is_over_wherever_it_is() -> None:
    world = World()
    lane = world.attach(seats=1)
    (runs,), (waits,), (unlimited,) = (world.submit(4, 40, timeout_ms=t, ignore_eos=True) for t in (2000, 1000, 0))
    world.turn()
    assert world.expire() == 101.0
    world.now = 101.0
    assert world.expire() == 102.0
    assert ended_in_time(waits) and waits.ended is not None and waits.ended.message == "not done within 1 s"
    world.now = 102.5
    assert world.expire() is None
    assert ended_in_time(runs)
    world.deliver(lane)
    world.run()
    assert runs.tokens == [] and len(unlimited.tokens) == 40
    world.check_idle()


def test_who_is_done_in_time_is_served_and_forgotten() -> None:
    world = World(request_timeout_s=5.0)
    world.attach()
    (short,), (long,) = world.submit(4, 3, timeout_ms=100_000, ignore_eos=True), world.submit(4, 3, ignore_eos=True)
    world.run()
    world.now = 500.0
    assert world.expire() is None and len(short.tokens) == len(long.tokens) == 3
    world.check_idle()


def test_the_configured_time_holds_for_who_names_none() -> None:
    world = World(request_timeout_s=5.0)
    (own,) = world.submit(4, 3, timeout_ms=9000, model="m")
    assert not own.accepted  # no executor yet
    world.attach(seats=1)
    (own,), (default,) = world.submit(4, 40, timeout_ms=9000, ignore_eos=True), world.submit(4, 40, ignore_eos=True)
    world.now = 105.0
    assert world.expire() == 109.0 and ended_in_time(default) and not own.over
    world.abort(own)
    world.check_idle()


def test_the_book_of_time_limits_does_not_grow_with_those_that_are_over() -> None:
    world = World()
    world.attach()
    for _ in range(300):
        world.submit(2, 1, timeout_ms=10**9)
        world.run()
    assert len(world.scheduler._timeouts._heap) <= 65 and len(world.scheduler._timeouts) == 0
    world.check_idle()


# --- the queue's limit ---


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    world = World(max_waiting=3)
    world.attach(seats=2)
    running = long_answers(world, 2)
    world.iterate()
    waiting = long_answers(world, 3)
    refused = world.submit(5, 3, n=2)
    for stream in refused:
        assert reason(stream) is EndReason.QUEUE_FULL and stream.ended is not None
        assert 1 <= stream.ended.retry_after_s <= 120
    world.run()
    assert whole(*running, *waiting)


def test_those_that_lost_their_executor_do_not_fill_the_queue() -> None:
    world = World(max_waiting=3)
    lane = world.attach()
    running = [*long_answers(world, 3)]
    world.iterate()
    running += long_answers(world, 3)
    world.iterate()
    world.lose(lane)
    newcomers = long_answers(world, 3)
    assert not any(stream.over for stream in newcomers)
    assert reason(long_answers(world, 1)[0]) is EndReason.QUEUE_FULL
    world.attach()
    world.run()
    assert whole(*running, *newcomers)
    assert not world.scheduler.queues["m"].num_new


def test_a_stream_number_in_use_is_refused() -> None:
    world = World()
    world.attach()
    long_answers(world, 1)
    world._num_streams = 0
    first = world.streams[0, 0]
    (double,) = world.submit(5, 3)
    assert reason(double) is EndReason.REJECTED
    world.streams[0, 0] = first
    world.run()
    assert whole(first)


def test_waiting_sequences_are_ordered_by_class_and_arrival() -> None:
    world = World()
    lane = world.attach(seats=1)
    streams = [world.submit(4, 2, priority=priority, ignore_eos=True)[0] for priority in (0, 2, -1, 0, 2, -1)]
    order: list[int] = []
    while world.turn():
        for number in world.members(lane):
            if number not in order:
                order.append(number)
        world.deliver(lane)
    assert order == [streams[i].number for i in (2, 5, 0, 3, 1, 4)]


def test_sequences_compare_by_identity() -> None:
    """The planner keeps them in dicts and sets."""
    assert Sequence.__eq__ is object.__eq__ and Sequence.__hash__ is object.__hash__
