"""Several lanes: one queue for all, balance, small and large ones, loss, drain, and the limit of the queue."""

from __future__ import annotations

import pytest

from common.wire import EndReason
from scheduler_svc.core import State, WaitReason
from scheduler_svc.core.config import Admission
from tests.core.model_executor import card
from tests.core.stream import Stream, reason, whole
from tests.core.totals import totals
from tests.core.world import World


def long_answers(world: World, count: int, **params: object) -> list[Stream]:
    return [world.submit(5, 20, ignore_eos=True, **params)[0] for _ in range(count)]


# --- balance ---


def test_a_burst_is_shared_evenly_in_one_turn() -> None:
    world = World()
    lanes = [world.attach() for _ in range(3)]
    streams = long_answers(world, 8)
    world.turn()
    assert [lane.num_running for lane in lanes] == [3, 3, 2]
    world.run()
    assert whole(*streams)


def test_a_newcomer_goes_to_the_emptier_lane() -> None:
    world = World()
    one, other = world.attach(), world.attach()
    streams = long_answers(world, 6)
    world.iterate()
    world.abort(*[s for s in streams if world.sequence(s).lane is other])
    assert (one.num_running, other.num_running) == (3, 0)
    for expected in (1, 2, 3):
        long_answers(world, 1)
        world.turn()
        assert (one.num_running, other.num_running) == (3, expected)
        world.deliver(one)
        world.deliver(other)


def test_what_was_left_to_a_lane_that_hangs_is_taken_before_long() -> None:
    world = World()
    one, other = world.attach(), world.attach()
    streams = long_answers(world, 8)
    world.iterate()
    world.abort(*[s for s in streams if world.sequence(s).lane is other][1:])
    world.turn()
    assert (one.num_running, other.num_running) == (4, 1)
    newcomers = long_answers(world, 2)
    world.deliver(one)  # the other one hangs
    world.plan(one)
    assert one.num_running == 4, "the emptier lane has room"
    assert {world.scheduler.why(world.sequence(s)) for s in newcomers} == {WaitReason.POLICY}
    world.deliver(one)
    world.now += 1
    world.plan(one)
    assert one.num_running == 6, "for some of its usual iterations, no longer"


def test_a_lane_without_room_is_no_reason_to_wait() -> None:
    for limit, expected in (({"seats": 1}, 1), ({"blocks": 7}, 3)):
        world = World()
        small, large = world.attach(**limit), world.attach()
        streams = long_answers(world, 8)
        world.turn()
        assert small.num_running == expected and large.num_running == 8 - expected, limit
        world.run()
        assert whole(*streams)


def test_what_is_too_large_for_a_lane_neither_waits_for_it_nor_holds_it_up() -> None:
    world = World(long_prefill_threshold=100)
    small, large = world.attach(blocks=4), world.attach(blocks=64)
    busy = [world.submit(20, 10, ignore_eos=True)[0] for _ in range(3)]
    world.turn()
    assert (small.num_running, large.num_running) == (0, 3)
    (large_one,), (small_one,) = world.submit(20, 4), world.submit(4, 4)
    world.turn()
    assert world.sequence(small_one).lane is small, "it passes the one that this lane cannot hold"
    assert world.sequence(large_one).state is State.WAITING
    world.deliver(large)
    world.turn()
    assert world.sequence(large_one).lane is large, "though the small lane runs fewer"
    for lane in (small, large):
        world.deliver(lane)
    world.run()
    assert whole(*busy, large_one, small_one)


def test_a_higher_class_preempts_only_where_no_lane_has_room() -> None:
    world = World()
    one, other = world.attach(seats=1), world.attach(seats=2)
    low = long_answers(world, 2, priority=3)
    world.turn()
    assert one.num_running == other.num_running == 1
    (high,) = long_answers(world, 1)
    world.deliver(one)
    world.plan(one)
    assert totals(world.scheduler).preemptions == 0 and world.sequence(high).lane is None
    world.deliver(other)
    world.plan(other)
    assert world.sequence(high).lane is other
    (second_high,) = long_answers(world, 1)
    world.deliver(other)
    world.plan(other)
    assert world.sequence(second_high).lane is other and totals(world.scheduler).preemptions == 1
    world.deliver(one)
    world.deliver(other)
    world.run()
    assert whole(*low, high, second_high)


def test_models_have_queues_of_their_own() -> None:
    world = World()
    world.attach(seats=1)
    other = world.attach(model=card(b"others", name="n"))
    first, waiting = long_answers(world, 2)
    (own,) = world.submit(5, 3, model="n")
    world.turn()
    assert other.num_running == 1 and world.sequence(own).lane is other
    assert world.sequence(waiting).state is State.WAITING
    for lane in world.lanes:
        world.deliver(lane)
    world.run()
    assert whole(first, waiting, own)


# --- loss ---


def test_what_ran_on_a_lost_lane_goes_on_elsewhere_without_repeating_a_token() -> None:
    for in_flight in (False, True):
        world = World()
        lost, other = world.attach(), world.attach()
        streams = world.submit(9, 20, n=4, temperature=1.0, ignore_eos=True, logprobs=1)
        for _ in range(5):
            world.iterate()
        if in_flight:
            world.turn()
        before = [len(stream.tokens) for stream in streams]
        world.lose(lost)
        assert [len(stream.tokens) for stream in streams] == before
        world.run()
        assert whole(*streams) and other.num_running == 0
        world.check_idle()


def test_aborted_ones_end_with_their_lane() -> None:
    world = World()
    lane = world.attach()
    (stream,) = long_answers(world, 1)
    world.turn()
    world.abort(stream)
    world.lose(lane)
    world.attach()
    assert not world.turn()
    world.check_idle()


def test_what_fits_no_lane_that_is_left_waits_in_nobodys_way_for_the_hold_time() -> None:
    world = World(hold_s=10.0)
    large = world.attach(blocks=64)
    world.attach(blocks=4)
    (begun,), (fitting,) = world.submit(20, 10, ignore_eos=True), world.submit(5, 5)
    world.iterate()
    at = world.now
    world.lose(large)
    waiting = [begun, *(s for _ in range(3) for s in world.submit(20, 10, n=100))]
    (behind,) = world.submit(5, 5, priority=1)
    world.run()
    assert whole(fitting, behind) and not any(stream.ended for stream in waiting)
    world.now = at + 9.0
    assert world.expire() == pytest.approx(at + 10.0)
    world.now = at + 10.0
    world.expire()
    assert {reason(stream) for stream in waiting} == {EndReason.NO_EXECUTOR}
    (refused,) = world.submit(20, 10)
    assert reason(refused) is EndReason.REJECTED, "the largest pool now is the small one"
    world.check_idle()


@pytest.mark.parametrize("back", ["attach", "resume"])
def test_what_waits_for_a_larger_lane_goes_on_when_it_is_back(back: str) -> None:
    world = World(hold_s=10.0)
    large = world.attach(blocks=64)
    world.attach(blocks=4)
    if back == "attach":
        world.lose(large)
    else:
        world.pause(large)
    (waiting,) = world.submit(20, 10, ignore_eos=True)
    world.run()
    assert waiting.ended is None
    world.now += 9.0
    world.expire()
    if back == "attach":
        world.attach(blocks=64)
    else:
        world.resume(large)
    assert world.expire() is None
    world.run()
    assert whole(waiting)


def test_a_smaller_replacement_is_not_blocked_by_what_it_cannot_hold() -> None:
    world = World(hold_s=10.0)
    lane = world.attach(blocks=64)
    (too_large,), (fitting,) = world.submit(20, 10, ignore_eos=True), world.submit(5, 5)
    world.iterate()
    at = world.now
    world.lose(lane)
    world.now = at + 6.0
    world.attach(blocks=4)
    world.run()
    assert whole(fitting) and too_large.ended is None
    world.now = at + 10.0
    world.expire()
    assert reason(too_large) is EndReason.NO_EXECUTOR, "the time without any lane counts"
    world.check_idle()


def test_guilty_sequences_end_alone() -> None:
    world = World()
    lane = world.attach()
    streams = long_answers(world, 3)
    world.turn()
    guilty = world.sequence(streams[1])
    world.lose(lane, (guilty.slot, 65_535), reason="bad row")
    assert reason(streams[1]) is EndReason.FAILED and streams[1].ended is not None
    assert streams[1].ended.message == "bad row"
    world.attach()
    world.run()
    assert whole(streams[0], streams[2])


def test_poison_is_found_and_nobody_else_ends() -> None:
    """Each iteration that has the poisoned sequence in it costs an executor."""
    world = World(max_strikes=4)
    streams = [*long_answers_later(world), *world.submit(9, 12, n=3, ignore_eos=True)]
    poison = streams[2]
    assert run_with_poison(world, poison) == 4
    assert whole(*[stream for stream in streams if stream is not poison])
    world.check_idle()


def test_who_was_unlucky_twice_is_not_blamed_for_the_poison_that_comes_then() -> None:
    world = World(max_strikes=4)
    (unlucky,) = long_answers_later(world, 1)
    for _ in range(2):
        world.turn()
        world.lose(world.lanes[0], reason="it died")
        world.attach()
    (poison,) = world.submit(9, 12, ignore_eos=True)
    assert run_with_poison(world, poison) == 4
    assert whole(unlucky)
    world.check_idle()


def run_with_poison(world: World, poison: Stream) -> int:
    """Until nothing is left to do but the poison's error. Returns how many executors it cost."""
    lost = 0
    for _ in range(400):
        if not world.lanes:
            world.attach()
        if not world.turn():
            break
        (lane,) = world.lanes
        if poison.number in world.members(lane):
            lost += 1
            world.lose(lane, reason="it died")
        else:
            world.deliver(lane)
        world.check()
    assert reason(poison) is EndReason.FAILED
    return lost


def long_answers_later(world: World, count: int = 4) -> list[Stream]:
    world.attach()
    return long_answers(world, count)


def test_an_executor_that_dies_now_and_then_costs_nobody_the_answer() -> None:
    """Strikes count only without progress in between."""
    world = World(max_strikes=2)
    world.attach()
    streams = long_answers(world, 3)
    for _ in range(12):
        world.iterate()
        world.turn()
        world.lose(world.lanes[0])
        world.attach()
    world.run()
    assert whole(*streams)


# --- drain ---


def test_a_drained_lane_moves_its_sequences_and_takes_no_new_ones() -> None:
    world = World()
    leaving, other = world.attach(), world.attach()
    streams = long_answers(world, 6)
    world.iterate()
    world.turn()
    world.drain(leaving)
    assert leaving.num_running == 3, "not while its iteration is out"
    world.deliver(leaving)
    world.turn()
    assert leaving not in world.lanes and other.num_running == 3
    world.deliver(other)
    world.run()
    assert whole(*streams) and totals(world.scheduler).preemptions == 0


def test_the_last_lane_finishes_what_it_has_and_the_rest_waits_for_another() -> None:
    world = World()
    leaving = world.attach(seats=2)
    running, waiting = long_answers(world, 2), long_answers(world, 1)
    world.iterate()
    world.drain(leaving)
    world.turn()
    assert world.scheduler.why(world.sequence(waiting[0])) is WaitReason.PAUSED
    world.deliver(leaving)
    world.run()
    assert whole(*running) and not world.lanes and not waiting[0].over
    assert world.scheduler.why(world.sequence(waiting[0])) is WaitReason.NO_EXECUTOR
    world.attach()
    world.run()
    assert whole(*waiting)


def test_what_fits_no_other_lane_finishes_on_the_drained_one() -> None:
    world = World()
    leaving = world.attach(blocks=64)
    world.attach(blocks=4)
    (too_large,), (fitting,) = world.submit(20, 10, ignore_eos=True), world.submit(5, 8, ignore_eos=True)
    world.iterate()
    world.drain(leaving)
    (waiting,) = world.submit(20, 10)
    world.run()
    assert whole(too_large, fitting) and len(world.lanes) == 1
    assert waiting.ended is None, "the lane that could hold it takes nothing new, but may come back"


def test_who_no_other_lane_admits_now_goes_on_where_it_is() -> None:
    """There are seats and blocks, but what those who run there may still need does not leave enough."""
    world = World(admission=Admission.WORST_CASE)
    leaving = world.attach(seats=1, blocks=12)
    (moved,) = world.submit(4, 30, ignore_eos=True)
    world.iterate()
    other = world.attach(seats=4, blocks=12)
    (there,) = world.submit(4, 30, ignore_eos=True)
    world.iterate()
    world.drain(leaving)
    assert leaving.num_running == 1 and len(other.free_slots) == 3
    while not there.over and not moved.over:
        assert world.sequence(moved).lane is not None, "it waits beside its idle executor"
        world.iterate()
    world.run()
    assert whole(moved, there)
