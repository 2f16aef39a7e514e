"""Lanes that an operator pauses and resumes, and spares that stand by."""

from __future__ import annotations

import pytest

from common.wire import EndReason
from scheduler_svc.core import WaitReason
from tests.core.model_executor import card
from tests.core.stream import reason, whole
from tests.core.test_lanes import long_answers
from tests.core.world import World

# --- pause and resume ---


def test_a_paused_lane_stays_empty_until_it_is_resumed() -> None:
    world = World()
    paused, other = world.attach(), world.attach()
    streams = long_answers(world, 4)
    world.iterate()
    world.pause(paused)
    world.iterate()
    assert paused in world.lanes and (paused.num_running, other.num_running) == (0, 4)
    streams += long_answers(world, 2)
    world.iterate()
    assert (paused.num_running, other.num_running) == (0, 6)
    world.resume(paused)
    streams += long_answers(world, 2)
    world.iterate()
    assert paused.num_running == 2
    world.run()
    assert whole(*streams) and paused in world.lanes
    world.check_idle()


def test_a_lane_resumed_before_it_is_empty_keeps_what_it_has() -> None:
    world = World()
    lane = world.attach()
    streams = long_answers(world, 3)
    world.iterate()
    world.pause(lane)
    world.iterate()
    assert lane.num_running == 3, "there is no other"
    world.resume(lane)
    streams += long_answers(world, 1)
    world.iterate()
    assert lane.num_running == 4
    world.run()
    assert whole(*streams)


def test_while_all_are_paused_requests_wait_as_long_as_the_hold_time() -> None:
    world = World(hold_s=10.0)
    lane = world.attach()
    world.pause(lane)
    (early,) = world.submit(5, 3)
    assert world.scheduler.why(world.sequence(early)) is WaitReason.PAUSED
    world.now += 9.9
    assert world.scheduler.availability.is_offered("m", world.now)
    world.scheduler.expire(world.now)
    world.read_outbox(None)
    assert not early.over
    world.now += 0.2
    world.scheduler.expire(world.now)
    world.read_outbox(None)
    (late,) = world.submit(5, 3)
    assert reason(early) is reason(late) is EndReason.NO_EXECUTOR
    world.resume(lane)
    (served,) = world.submit(5, 3)
    world.run()
    assert whole(served)


def test_the_hold_time_begins_when_nobody_takes_sequences_and_anew_for_those_served_since() -> None:
    world = World(hold_s=10.0)
    lane = world.attach()
    (stream,) = long_answers(world, 1)
    world.iterate()
    world.leave(lane)
    world.now += 8
    world.iterate()
    world.lose(lane)
    world.now += 8
    world.scheduler.expire(world.now)
    world.read_outbox(None)
    assert not stream.over
    world.attach()
    world.run()
    assert whole(stream)


def test_a_paused_lane_that_dies_begins_no_new_hold_time() -> None:
    world = World(hold_s=10.0)
    lane = world.attach()
    world.pause(lane)
    world.turn()
    world.now += 11
    world.lose(lane)
    assert not world.scheduler.availability.is_offered("m", world.now)


def test_a_paused_executor_that_comes_again_begins_no_new_hold_time() -> None:
    world = World(hold_s=10.0)
    lane = world.attach()
    world.pause(lane)
    world.turn()
    (early,) = long_answers(world, 1)
    for _ in range(3):
        world.now += 3
        world.lose(world.lanes[0])
        again = world.attach(paused=True)
        world.check()
        assert world.scheduler.why(world.sequence(early)) is WaitReason.PAUSED
    assert world.scheduler.availability.is_offered("m", world.now)
    world.now += 2
    world.expire()
    assert reason(early) is EndReason.NO_EXECUTOR and not world.scheduler.availability.is_offered("m", world.now)
    world.resume(again)
    (late,) = long_answers(world, 1)
    world.run()
    assert whole(late)


def test_the_first_executor_of_a_model_may_come_paused() -> None:
    world = World(hold_s=10.0)
    lane = world.attach(paused=True)
    (stream,) = long_answers(world, 1)
    world.turn()
    assert lane.stays and world.scheduler.why(world.sequence(stream)) is WaitReason.PAUSED
    world.resume(lane)
    world.run()
    assert whole(stream)


def test_a_paused_executor_that_is_told_to_go_goes() -> None:
    world = World()
    lane = world.attach()
    world.pause(lane)
    world.turn()
    assert lane in world.lanes
    world.leave(lane)
    world.turn()
    assert lane not in world.lanes


@pytest.mark.parametrize("verb", ["pause", "resume"])
def test_one_that_shall_go_is_not_held_back(verb: str) -> None:
    world = World()
    lane = world.attach()
    (stream,) = long_answers(world, 1)
    world.iterate()
    world.leave(lane)
    getattr(world, verb)(lane)
    world.run()
    assert whole(stream) and lane not in world.lanes


def test_prefixes_outlive_a_pause() -> None:
    world = World()
    lane = world.attach()
    prompt = list(range(2, 22))
    world.submit(prompt, 3)
    world.run()
    world.pause(lane)
    world.turn()
    world.resume(lane)
    (stream,) = world.submit(prompt, 3)
    world.run()
    assert stream.ended is not None and stream.ended.cached_tokens == 16


# --- vacate ---


def test_a_vacated_lane_gives_back_what_has_no_place_elsewhere() -> None:
    world = World()
    lane, other = world.attach(), world.attach(seats=1)
    streams = long_answers(world, 4)
    world.iterate()
    world.pause(lane)
    world.iterate()
    assert lane.num_running and other.num_running == 1
    world.scheduler.vacate(lane, world.now)
    world.iterate()
    assert not lane.num_running and other.num_running == 1
    world.run()
    assert whole(*streams)


def test_what_fits_only_the_vacated_lane_ends_there() -> None:
    world = World()
    large = world.attach(blocks=64)
    world.attach(blocks=4)
    (too_large,) = world.submit(20, 10, ignore_eos=True)
    world.iterate()
    world.pause(large)
    world.scheduler.vacate(large, world.now)
    world.run()
    assert whole(too_large) and large in world.lanes


def test_a_vacated_last_lane_leaves_its_sequences_all_of_the_hold_time() -> None:
    world = World(hold_s=10.0)
    lane = world.attach()
    streams = long_answers(world, 2)
    world.iterate()
    world.pause(lane)
    world.now += 9
    world.iterate()
    world.scheduler.vacate(lane, world.now)
    world.turn()
    assert not lane.num_running
    assert {world.scheduler.why(world.sequence(s)) for s in streams} == {WaitReason.PAUSED}
    world.now += 9
    assert world.scheduler.expire(world.now) == world.now + 1
    world.read_outbox(None)
    world.resume(lane)
    world.run()
    assert whole(*streams)


def test_an_open_lane_is_not_vacated() -> None:
    world = World()
    lane = world.attach()
    long_answers(world, 2)
    world.iterate()
    world.scheduler.vacate(lane, world.now)
    world.iterate()
    assert lane.num_running == 2


def test_who_gives_way_on_a_paused_lane_and_fits_no_other_waits_out_the_hold_time() -> None:
    """No lane that takes sequences could hold it."""
    world = World(hold_s=10.0)
    large = world.attach(blocks=12)
    world.attach(blocks=4)
    streams = [world.submit(14, 20, ignore_eos=True)[0] for _ in range(2)]
    world.iterate()
    assert large.num_running == 2
    world.pause(large)
    world.run()
    assert {reason(stream) for stream in streams if stream.ended} == {EndReason.LENGTH}
    assert len(world.scheduler.live) == 1
    world.now += 10.0
    world.expire()
    assert {reason(stream) for stream in streams} == {EndReason.LENGTH, EndReason.NO_EXECUTOR}
    world.check_idle()


# --- spares ---


def test_a_spare_gets_nothing_beside_another_lane_and_all_when_it_is_lost() -> None:
    world = World()
    main, spare = world.attach(seats=2), world.attach(spare=True)
    streams = long_answers(world, 4)
    for _ in range(3):
        world.iterate()
    assert (main.num_running, spare.num_running) == (2, 0), "though two wait"
    world.turn()
    world.lose(main)
    world.turn()
    assert spare.num_running == 4
    world.deliver(spare)
    world.run()
    assert whole(*streams)


def test_a_spare_takes_over_what_is_drained_and_steps_back_when_another_comes() -> None:
    world = World()
    main, spare = world.attach(), world.attach(spare=True)
    streams = long_answers(world, 3)
    world.iterate()
    world.pause(main)
    world.iterate()
    assert (main.num_running, spare.num_running) == (0, 3)
    world.resume(main)
    streams += long_answers(world, 2)
    world.iterate()
    assert (main.num_running, spare.num_running) == (2, 3), "what it has it goes on with"
    world.run()
    assert whole(*streams)


def test_a_spare_alone_serves() -> None:
    world = World()
    spare = world.attach(spare=True)
    (stream,) = long_answers(world, 1)
    world.iterate()
    assert spare.num_running == 1 and not spare.stands_by
    main = world.attach()
    assert spare.stands_by
    world.pause(spare)
    world.lose(main)
    assert not spare.admits, "it is paused"
    world.resume(spare)
    world.run()
    assert whole(stream)


def test_what_a_request_may_need_is_measured_by_those_that_take_it() -> None:
    world = World()
    main = world.attach(blocks=4)
    world.attach(blocks=64, spare=True)
    (refused,) = world.submit(20, 10)
    assert reason(refused) is EndReason.REJECTED
    world.lose(main)
    (served,) = world.submit(20, 10)
    world.run()
    assert whole(served)


def test_another_models_spare_is_no_help() -> None:
    world = World()
    lane = world.attach()
    other = world.attach(model=card(b"others", name="n"), spare=True)
    (stream,) = long_answers(world, 1)
    world.lose(lane)
    assert world.scheduler.why(world.sequence(stream)) is WaitReason.NO_EXECUTOR and other.admits
