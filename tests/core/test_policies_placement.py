"""Where a sequence goes, what the cache keeps, and what a sequence is told that it waits for."""

from __future__ import annotations

import pytest

from common.wire import Retention
from scheduler_svc.core import Lane, State, WaitReason
from scheduler_svc.core.config import Batching, Eviction, Prefill
from tests.core.model_executor import card
from tests.core.stream import Stream
from tests.core.world import World

PREFIX = list(range(2, 22))
"""Five blocks of four."""


def place(world: World, stream: Stream) -> Lane | None:
    return world.sequence(stream).lane


def deliver_all(world: World) -> None:
    for lane in world.lanes:
        if lane.epoch in world.out:
            world.deliver(lane)


def cached(world: World, prompt: list[int], **params: object) -> int:
    """Prompt tokens that a request finds, when it is alone."""
    (stream,) = world.submit(prompt, 1, **params)
    world.run()
    assert stream.ended is not None
    return stream.ended.cached_tokens


# --- several lanes ---


def two_lanes_one_warm(seats: int = 8) -> tuple[World, Lane, Lane]:
    """The second lane alone holds the prefix."""
    world = World()
    cold = world.attach(blocks=200, seats=seats)
    warm = world.attach(blocks=200, seats=seats)
    (filler,) = world.submit(4, 40, ignore_eos=True)
    (first,) = world.submit([*PREFIX, 30], 4, ignore_eos=True)
    world.turn()
    assert place(world, filler) is cold and place(world, first) is warm
    deliver_all(world)
    while not first.over:
        world.iterate()
    world.abort(filler)
    return world, cold, warm


def test_a_prefix_goes_to_the_lane_that_holds_it() -> None:
    world, _, warm = two_lanes_one_warm()
    (again,), (other,) = world.submit([*PREFIX, 31], 9, ignore_eos=True), world.submit(21, 9, ignore_eos=True)
    world.turn()
    assert place(world, again) is warm and world.sequence(again).cached_tokens == 20
    assert place(world, other) is not None
    deliver_all(world)
    world.run()


def test_a_prefix_that_all_share_does_not_pile_up_on_one_lane() -> None:
    """Beyond an even share it outweighs an eighth of the seats, at least one."""
    for seats in (8, 16):
        world, cold, warm = two_lanes_one_warm(seats)
        for i in range(3 * seats):
            world.submit([*PREFIX, 2 + i], 9, ignore_eos=True)
            world.turn()
            assert warm.num_running - cold.num_running <= 2 * (seats // 8) + 1
            deliver_all(world)
        world.run()


def test_a_lane_that_hangs_delays_nobody_longer_than_the_patience() -> None:
    """Four of its mean iterations, at least 20 ms; here iterations take 10 ms."""
    world, cold, warm = two_lanes_one_warm()
    world.submit(4, 90 // 3, ignore_eos=True)
    world.submit([*PREFIX, 2], 20, ignore_eos=True)
    for _ in range(30):
        world.turn()
        world.now += 0.01
        deliver_all(world)
    world.submit([*PREFIX, 2], 20, ignore_eos=True)
    world.turn()
    assert warm.epoch in world.out
    if cold.epoch in world.out:
        world.deliver(cold)
    (victim,) = world.submit([*PREFIX, 5], 4, ignore_eos=True)
    started = world.now
    world.turn()
    assert place(world, victim) is None, "left to the warm lane"
    assert world.scheduler.why(world.sequence(victim)) is WaitReason.POLICY
    while place(world, victim) is None:
        world.now += 0.005
        assert world.now - started <= 0.06
        if cold.epoch in world.out:
            world.deliver(cold)
        world.turn()
    assert place(world, victim) is cold
    deliver_all(world)
    world.run()


# --- cache hints ---


@pytest.mark.parametrize("eviction", Eviction)
def test_what_is_to_be_kept_survives_pressure(eviction: Eviction) -> None:
    found = {}
    for retention in (Retention.NORMAL, Retention.KEEP):
        world = World(eviction=eviction)
        world.attach(blocks=20)
        cached(world, [*PREFIX, 30], retention=retention)
        for i in range(8):
            world.submit([3 + i] * 21, 2)
            world.run()
        found[retention] = cached(world, [*PREFIX, 31])
    assert found == {Retention.NORMAL: 0, Retention.KEEP: 20}


def test_what_is_to_be_dropped_leaves_nothing() -> None:
    world = World()
    lane = world.attach(blocks=40)
    cached(world, [*PREFIX, 30], retention=Retention.DROP)
    assert lane.pool.num_cached == 0 and cached(world, [*PREFIX, 30]) == 0
    assert cached(world, [*PREFIX, 30], retention=Retention.DROP) == 20, "it may use what others left"


@pytest.mark.parametrize("isolate", [False, True])
def test_a_salt_keeps_prefixes_apart_and_tenants_do_where_asked(isolate: bool) -> None:
    world = World(isolate_tenants=isolate)
    world.attach(blocks=100)
    cached(world, [*PREFIX, 30], tenant="a")
    assert cached(world, [*PREFIX, 30], tenant="a", salt=b"s") == 0
    assert cached(world, [*PREFIX, 30], tenant="a", salt=b"s") == 20
    assert cached(world, [*PREFIX, 30], tenant="b") == (0 if isolate else 20)
    assert cached(world, [*PREFIX, 30], tenant="a") == 20
    assert cached(world, [*PREFIX, 30], tenant="b", salt=b"s") == (0 if isolate else 20)


def test_policies_of_eviction_choose_differently() -> None:
    """Prompts of two blocks in the order x y y z x; then there is room for two of them."""
    kept = {}
    for eviction in Eviction:
        world = World(eviction=eviction)
        world.attach(blocks=8)
        prompts = {name: [3 + i] * 9 for i, name in enumerate("xyz")}
        for name in "xyyzx":
            cached(world, prompts[name])
        cached(world, [20] * 13)
        lane = world.lanes[0]
        for name in "xyz":
            (stream,) = world.submit(prompts[name], 1)
            kept[eviction] = kept.get(eviction, "") + name * bool(lane.prefix_hit(world.sequence(stream)))
            world.abort(stream)
    assert kept == {Eviction.LRU: "xz", Eviction.LFU: "xy", Eviction.FIFO: "yz"}


# --- reasons ---


def test_each_reason_is_told_where_it_holds() -> None:
    world = World(hold_s=5.0)
    lane = world.attach(seats=2, budget=16, blocks=24)
    world.lose(lane)
    (early,) = world.submit(20, 20, ignore_eos=True)
    seen = {world.scheduler.why(world.sequence(early))}
    assert seen == {WaitReason.NO_EXECUTOR}
    lane = world.attach(seats=2, budget=16, blocks=24)
    (second,) = world.submit(4, 30, ignore_eos=True)
    assert world.scheduler.why(world.sequence(second)) is WaitReason.POLICY, "not looked at yet"
    (third,) = world.submit(4, 2, ignore_eos=True)
    world.turn()
    assert world.scheduler.why(world.sequence(early)) is WaitReason.NONE
    assert world.scheduler.why(world.sequence(third)) is WaitReason.SEATS
    world.deliver(lane)
    world.drain(lane)
    assert world.scheduler.why(world.sequence(third)) is WaitReason.PAUSED
    world.run()
    world.attach()
    world.run()
    assert not world.scheduler.live


def test_tokens_and_blocks_are_named() -> None:
    world = World(long_prefill_threshold=100)
    lane = world.attach(blocks=8, budget=8)
    first, behind = (world.submit(20, 2, ignore_eos=True)[0] for _ in range(2))
    world.turn()
    assert world.scheduler.why(world.sequence(behind)) is WaitReason.TOKEN_BUDGET
    while not first.tokens:
        deliver_all(world)
        world.turn()
    assert world.scheduler.why(world.sequence(behind)) is WaitReason.KV_BLOCKS
    world.deliver(lane)
    world.run()


def test_those_behind_one_that_waits_for_blocks_wait_by_policy() -> None:
    world = World()
    lane = world.attach(blocks=12, seats=8)
    world.submit(20, 20, ignore_eos=True)
    world.iterate()
    (big,), (small,) = world.submit(40, 2), world.submit(2, 2)
    world.turn()
    assert world.scheduler.why(world.sequence(big)) is WaitReason.KV_BLOCKS
    assert world.scheduler.why(world.sequence(small)) is WaitReason.POLICY
    world.deliver(lane)
    world.run()


@pytest.mark.parametrize("changes", [{}, {"batching": Batching.REQUEST}, {"prefill": Prefill.SEPARATE}])
def test_what_each_waited_adds_up_to_what_all_waited(changes: dict[str, object]) -> None:
    """The world compares both with its own clock at every step; here both are compared with plain arithmetic."""
    world = World(**changes)
    lane = world.attach(seats=3, blocks=5, model=card(max_len=100))
    streams = [world.submit(5, 7, ignore_eos=True)[0] for _ in range(7)]
    waits = dict.fromkeys(streams, 0.0)
    while world.scheduler.live:
        world.turn()
        world.now += 0.25
        for stream in streams:
            if not stream.over and world.sequence(stream).state is State.WAITING:
                waits[stream] += 0.25
        for stream in streams:
            if not stream.over:
                sequence = world.sequence(stream)
                queue = world.scheduler.queues["m"]
                told = sequence.waited if sequence.lane else queue.waited(sequence, world.now)
                assert sum(told.values()) == pytest.approx(waits[stream])
        world.deliver(lane)
    assert sum(world.scheduler.counters.waited_s.values()) == pytest.approx(sum(waits.values()))
    assert sum(waits.values()) > 0
