"""Hand-over: a sequence goes on where its KV went; whatever fails, it is computed anew and nobody notices."""

from __future__ import annotations

from typing import Any

import pytest

from common.wire import EndReason, Fetch
from scheduler_svc.core import Lane, State, WaitReason
from scheduler_svc.core.config import Batching, Handover
from scheduler_svc.core.handover import AHEAD_S, ASSUMED_PREFILL_S, OVERHEAD_S
from tests.core.stream import Stream, reason, whole
from tests.core.world import World


def begun(num_streams: int = 1, prompt: int = 10, *, iterations: int = 3, **changes: Any) -> tuple[World, Lane, Lane]:
    """Streams that decode on the first of two lanes; the second has just come."""
    world = World(**{"handover": Handover.ALWAYS, **changes})
    source = world.attach(transfer=True)
    for _ in range(num_streams):
        world.submit(prompt, 14, ignore_eos=True)
    for _ in range(iterations):
        world.iterate()
    return world, source, world.attach(transfer=True)


def streams(world: World) -> list[Stream]:
    return list(world.streams.values())


def test_nothing_is_computed_twice() -> None:
    world, source, target = begun(3)
    computed = world.executors[source.epoch].computed_tokens
    world.drain(source)
    assert len(world.fetches.pending) == 3 and sorted(target.arriving) == sorted(s.slot for s in target.running())
    world.run()
    assert whole(*streams(world)) and world.lanes == [target]
    # The last token of each is never computed.
    assert computed + world.executors[target.epoch].computed_tokens == 3 * (10 + 14 - 1)
    counters = world.scheduler.counters
    assert (counters.handovers_done, counters.handovers_failed, counters.recomputed_tokens) == (3, 0, 0)
    assert counters.handover_blocks == 3 * 3


def test_a_begun_prefill_goes_on_where_it_was() -> None:
    world, source, target = begun(1, 30, iterations=2, max_num_batched_tokens=8)
    sequence = world.sequence(streams(world)[0])
    assert sequence.prefilling and int(source.computed[sequence.slot]) == 16
    world.drain(source)
    world.run()
    assert whole(*streams(world))
    assert world.executors[target.epoch].computed_tokens == 30 + 14 - 1 - 16


def test_what_the_target_has_cached_is_not_sent() -> None:
    world, source, target = begun(0)
    beginning = list(range(2, 20))
    source.draining = True
    world.submit(beginning, 1)
    world.plan(target)
    world.deliver(target)
    source.draining, target.draining = False, True
    (stream,) = world.submit([*beginning, 21, 22], 14, ignore_eos=True)
    world.plan(source)
    world.deliver(source)
    target.draining = False
    world.drain(source)
    (fetching,) = world.fetches.pending.values()
    assert len(fetching.order.blocks) == 5 - 4, "18 of 20 tokens are there as four whole blocks"
    world.run()
    assert whole(stream) and world.scheduler.counters.handover_blocks == 1


def test_full_blocks_that_came_are_found_by_others() -> None:
    world, source, target = begun()
    world.drain(source)
    world.iterate()
    before = target.pool.num_cached
    assert before == 3, "12 tokens had KV"
    (again,) = world.submit(streams(world)[0].prompt, 3)
    world.run()
    assert again.ended is not None and again.ended.cached_tokens == 8


@pytest.mark.parametrize("num_there", [0, 1])
def test_a_failure_means_to_compute_anew(num_there: int) -> None:
    world, source, target = begun()
    world.drain(source)
    if num_there:
        world.fetches.come(1, num_there)
    world.fetches.come(1, 0, fail=True)
    assert not target.arriving and not source.lent and world.sequence(streams(world)[0]).state is State.WAITING
    world.run()
    assert whole(*streams(world))
    counters = world.scheduler.counters
    assert counters.handovers_failed == 1 and counters.recomputed_tokens == 12 and not counters.handover_blocks


def test_blocks_stay_held_on_both_sides_until_the_answer() -> None:
    world, source, target = begun()
    world.drain(source)
    (stream,) = streams(world)
    world.abort(stream)
    assert world.fetches.pending[1].recalled
    assert source.pool.num_referenced == 3 and target.pool.num_referenced == 4 and target.num_running == 1
    world.turn()
    assert source in world.lanes, "what it lent may still be read"
    world.fetches.come(1)
    assert source.is_vacant and target.is_vacant and not target.pool.num_referenced
    world.run()
    assert world.lanes == [target]
    world.check_idle()


def test_a_lost_source_costs_what_has_not_come() -> None:
    for num_there, is_done in ((2, False), (3, True)):
        world, source, target = begun()
        world.drain(source)
        fetching = world.fetches.pending[1]
        for place in range(num_there):
            world.executors[target.epoch].write(
                int(fetching.order.blocks[place]), world.executors[source.epoch].kv[source.lent[1][place]]
            )
        fetching.num_there = num_there
        world.lose(source)
        assert fetching.recalled and target.arriving, "its seat and blocks stay until the target answers"
        world.run()
        assert whole(*streams(world)) and world.scheduler.counters.handovers_done == is_done
        world.check_idle()


def test_a_lost_target_means_to_compute_anew() -> None:
    world, source, target = begun()
    world.drain(source)
    world.lose(target)
    assert not source.lent and not source.pool.num_referenced
    (stream,) = streams(world)
    assert world.sequence(stream).state is State.WAITING
    assert world.scheduler.why(world.sequence(stream)) in (WaitReason.PAUSED, WaitReason.NO_EXECUTOR)
    world.turn()
    world.attach()
    world.run()
    assert whole(stream)


def test_a_target_that_drains_passes_on_what_has_come() -> None:
    world, source, target = begun()
    world.drain(source)
    third = world.attach(transfer=True)
    world.drain(target)
    world.turn()
    assert target in world.lanes and target.arriving, "what is on the way cannot be turned round"
    world.run()
    assert whole(*streams(world)) and world.lanes == [third]
    assert world.scheduler.counters.handovers_done == 2


def test_who_does_not_come_to_a_closed_lane_and_fits_no_other_waits_for_one_that_it_fits() -> None:
    world, source, target = begun(hold_s=5.0)
    world.drain(source)
    world.attach(blocks=4)
    world.pause(target)
    world.fetches.come(1, fail=True)
    assert reason(*streams(world)) is None
    world.now += 5.0
    world.expire()
    assert reason(*streams(world)) is EndReason.NO_EXECUTOR
    world.run()
    world.check_idle()


def test_who_does_not_come_to_a_closed_lane_has_all_of_the_hold_time() -> None:
    world, source, target = begun(hold_s=5.0)
    world.drain(source)
    world.pause(target)
    world.now += 6.0
    world.expire()
    world.fetches.come(1, fail=True)
    world.now += 4.0
    world.expire()
    world.resume(target)
    world.run()
    assert whole(*streams(world))


def test_nobody_takes_the_seat_or_preempts_who_is_on_the_way() -> None:
    world = World(handover=Handover.ALWAYS)
    source = world.attach(transfer=True)
    (stream,) = world.submit(10, 14, ignore_eos=True, priority=5)
    world.iterate()
    target = world.attach(seats=1, transfer=True)
    world.drain(source)
    (urgent,) = world.submit(5, 3, priority=-1)
    world.turn()
    assert world.scheduler.why(world.sequence(urgent)) is WaitReason.SEATS
    assert world.scheduler.why(world.sequence(stream)) is WaitReason.PAUSED and target.arriving
    world.run()
    assert whole(stream, urgent)


def test_the_others_decode_while_the_first_move() -> None:
    world, source, target = begun(6)
    handovers = world.scheduler.handovers
    handovers._byte_s = AHEAD_S / 2 / (3 * 32)
    world.leave(source)
    plan = world.plan(source)
    assert len(target.arriving) == 2 and source.num_running == 4
    assert plan is not None and len(plan.decodes) == 4
    world.deliver(source)
    world.run()
    assert whole(*streams(world)) and world.scheduler.counters.handovers_done == 6
    assert world.scheduler.counters.recomputed_tokens == 0


def test_an_answer_to_nothing_changes_nothing() -> None:
    world, source, target = begun()
    world.drain(source)
    for lane, ticket in ((target, 2), (source, 1)):
        world.scheduler.fetched(lane, ticket, world.now, done=True, busy_s=1.0)
    assert target.arriving and source.lent
    world.run()
    world.scheduler.fetched(target, 1, world.now, done=False, busy_s=1.0)
    world.check_idle()
    assert whole(*streams(world))


def test_the_cheaper_way_is_taken() -> None:
    """By what was measured of both."""
    world, source, target = begun(handover=Handover.AUTO)
    handovers = world.scheduler.handovers
    tokens, size = 12, 3 * source.transfer.block_bytes
    for token_s, byte_s, is_moved in (
        (0.0, 1e-12, ASSUMED_PREFILL_S * tokens > OVERHEAD_S),
        (0.001, 1e-12, True),
        (0.001, 0.009 / size, False),
        (0.001, 0.005 / size, True),
    ):
        target.pace.prefill_token_s, handovers._byte_s = token_s, byte_s
        assert handovers._is_worth(source, target, world.sequence(streams(world)[0]), 0) == is_moved
    assert not handovers._is_worth(source, target, world.sequence(streams(world)[0]), 3), "all of it is there"


def test_the_pace_of_transfers_is_learned() -> None:
    world, source, target = begun()
    handovers = world.scheduler.handovers
    handovers._byte_s = 1.0
    world.drain(source)
    size = 3 * source.transfer.block_bytes
    world.scheduler.fetched(target, 1, world.now, done=True, busy_s=0.5 * size)
    assert handovers._byte_s == pytest.approx(0.9)


@pytest.mark.parametrize(
    "change", ["never", "no address", "layout", "size", "place", "far", "suspect", "request-level", "swapping"]
)
def test_who_may_hand_over_to_whom(change: str) -> None:
    world, source, target = begun(handover=Handover.NEVER if change == "never" else Handover.ALWAYS)
    sequence = world.sequence(streams(world)[0])
    point, expected = source.transfer, change == "far"
    match change:
        case "no address":
            source.transfer = type(point)()
        case "layout":
            target.transfer = type(point)(point.address, layout=b"other", block_bytes=point.block_bytes)
        case "size":
            target.transfer = type(point)(point.address, layout=point.layout, block_bytes=1)
        case "place":
            source.transfer = type(point)(point.address, b"", b"here", point.layout, point.block_bytes)
        case "far":
            target.transfer = type(point)(point.address, b"", b"there", point.layout, point.block_bytes)
        case "suspect":
            sequence.strikes, sequence.struck_at = 2, sequence.num_tokens
        case "request-level":
            world, source, target = begun(batching=Batching.REQUEST, handover=Handover.ALWAYS)
        case "swapping":
            target.changes.swap_outs.append((0, 0))
    world.drain(source)
    assert bool(world.fetches.pending) == expected
    target.changes.swap_outs.clear()
    world.run()
    assert whole(*streams(world))


def test_the_orders_name_what_the_executors_need() -> None:
    world, source, target = begun()
    world.leave(source)
    assert world.scheduler.plan(source, world.now) is None
    lend, fetch = world.scheduler.handovers.orders
    assert isinstance(fetch, Fetch)
    assert (lend.epoch, fetch.epoch, lend.ticket) == (source.epoch, target.epoch, fetch.ticket)
    assert lend.blocks.tolist() == source.lent[1] and fetch.blocks.tolist() == target.table(*target.arriving)[:3]
    assert (fetch.address, fetch.secret, lend.secret) == (source.transfer.address, b"", b"")
    assert fetch.timeout_ms >= 2000
    world.read_outbox(None)
    world.run()
