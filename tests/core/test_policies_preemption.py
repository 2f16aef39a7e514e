"""Who gives way, what becomes of their KV, and what admission does so that it is rare (C07, C18)."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from common.wire import EndReason
from scheduler_svc.core import Lane, State, WaitReason
from scheduler_svc.core.config import Admission, Discipline, KvLayout, Preemption, Prefill
from tests.core.model_executor import card
from tests.core.stream import Stream, whole
from tests.core.totals import totals
from tests.core.world import World

GIVE_WAY = [Preemption.RECOMPUTE, Preemption.SWAP]


def until_preempted(world: World) -> None:
    while totals(world.scheduler).preemptions == 0:
        assert world.iterate()


# --- progress ---


@pytest.mark.parametrize("preemption", GIVE_WAY)
@pytest.mark.parametrize("discipline", Discipline)
def test_equal_classes_do_not_take_turns_in_preempting_each_other(
    preemption: Preemption, discipline: Discipline
) -> None:
    world = World(preemption=preemption, discipline=discipline)
    world.attach(blocks=15, seats=4, host_blocks=20)
    streams = [world.submit(8, 30, ignore_eos=True, tenant="abc"[i % 3])[0] for i in range(30)]
    generated = 0
    while world.iterate():
        assert totals(world.scheduler).generation_tokens > generated, "an iteration without a token"
        generated = totals(world.scheduler).generation_tokens
    assert 0 < totals(world.scheduler).preemptions <= 2 * 30 and whole(*streams)


@pytest.mark.parametrize("preemption", GIVE_WAY)
@pytest.mark.parametrize("discipline", Discipline)
def test_the_last_in_order_gives_way_and_resumes_before_a_newcomer(
    preemption: Preemption, discipline: Discipline
) -> None:
    world = World(preemption=preemption, discipline=discipline)
    world.attach(blocks=9, seats=4, host_blocks=9)
    elder, younger = (world.submit(8, 24, ignore_eos=True)[0] for _ in range(2))
    until_preempted(world)
    assert world.sequence(younger).state is State.WAITING
    (newcomer,) = world.submit(4, 2, ignore_eos=True)
    while world.sequence(younger).state is State.WAITING:
        assert not newcomer.tokens, "the newcomer overtook the preempted one"
        assert world.iterate()
    world.run()
    assert whole(elder, younger, newcomer)


def test_nobody_gives_way_for_one_that_then_has_no_room() -> None:
    world = World()
    world.attach(blocks=12, seats=4)
    (peer,), (low,) = world.submit(20, 9, ignore_eos=True), world.submit(4, 9, priority=1, ignore_eos=True)
    world.iterate()
    (big,) = world.submit(30, 9, ignore_eos=True)
    world.turn()
    assert world.sequence(low).state is State.RUNNING and world.sequence(big).state is State.WAITING
    assert world.scheduler.why(world.sequence(big)) is WaitReason.KV_BLOCKS
    for lane in world.lanes:
        world.deliver(lane)
    world.run()
    assert whole(peer, low, big)


def test_the_token_of_a_preempted_decode_goes_to_prefill() -> None:
    world = World()
    world.attach(seats=1, budget=8)
    world.submit(4, 9, priority=1, ignore_eos=True)
    for _ in range(2):
        world.iterate()
    world.submit(8, 2, ignore_eos=True)
    world.iterate()
    assert world.plans[-1].prefill_lengths.tolist() == [8] and not len(world.plans[-1].decodes)
    world.run()


def test_who_was_preempted_between_phases_waits_for_blocks() -> None:
    """Nobody could be seated; then a decode found no block, and its victim gave up a seat."""
    world = World(prefill=Prefill.SEPARATE)
    lane = world.attach(blocks=5, seats=2)
    streams = [world.submit(7, 9, ignore_eos=True)[0] for _ in range(3)]
    until_preempted(world)
    world.turn()
    waiting = [world.sequence(stream) for stream in streams[1:]]
    assert {world.scheduler.why(sequence) for sequence in waiting} <= {WaitReason.KV_BLOCKS, WaitReason.POLICY}
    world.deliver(lane)
    world.run()
    assert whole(*streams)


# --- swap ---


def swapping(host_blocks: int = 20, **changes: object) -> tuple[World, Lane, list[Stream]]:
    """Two that do not fit beside each other to their ends; the younger was just preempted."""
    world = World(preemption=Preemption.SWAP, prefix_caching=False, **changes)
    lane = world.attach(blocks=9, seats=4, host_blocks=host_blocks)
    streams = [world.submit(8, 24, ignore_eos=True)[0] for _ in range(2)]
    until_preempted(world)
    return world, lane, streams


def test_kv_goes_to_the_host_and_back_and_nothing_is_computed_twice() -> None:
    world, lane, streams = swapping()
    out = world.plans[-1].swap_outs.reshape(-1, 2)
    sequence = world.sequence(streams[1])
    assert sequence.swapped is not None
    assert out[:, 1].tolist() == sequence.swapped.blocks and len(out) == -(-sequence.swapped.computed // 4)
    computed = sequence.swapped.computed
    world.run()
    resumed = next(plan for plan in world.plans if len(plan.swap_ins))
    back = resumed.swap_ins.reshape(-1, 2)
    assert back[:, 0].tolist() == out[:, 1].tolist(), "from the host blocks they were put in, in their order"
    assert back[:, 1].tolist() == resumed.new[0].blocks[: len(back)].tolist()
    assert resumed.new[0].computed == computed
    assert world.executors[lane.epoch].computed_tokens == 2 * (8 + 24 - 1)
    assert world.scheduler.counters.recomputed_tokens == 0 and whole(*streams)
    assert world.scheduler.counters.swapped_out_blocks == world.scheduler.counters.swapped_in_blocks == len(out)
    world.check_idle()


def test_a_full_host_means_recomputing() -> None:
    world, lane, streams = swapping(host_blocks=1)
    world.run()
    counters = world.scheduler.counters
    assert counters.swapped_out_blocks == 0 and counters.recomputed_tokens > 0 and whole(*streams)
    assert world.executors[lane.epoch].computed_tokens == 2 * (8 + 24 - 1) + counters.recomputed_tokens


def test_abort_gives_host_blocks_back() -> None:
    world, lane, streams = swapping()
    assert lane.host.num_held
    world.abort(streams[1])
    assert not lane.host.num_held
    world.run()
    assert lane.host.num_available == 20 and not any(len(plan.swap_ins) for plan in world.plans)
    world.check_idle()


def test_a_lost_lane_takes_what_was_swapped_with_it() -> None:
    world, lane, streams = swapping()
    world.lose(lane)
    assert world.sequence(streams[1]).swapped is None
    world.attach(blocks=30, host_blocks=20)
    world.turn()
    assert all(new.computed == 0 for new in world.plans[-1].new) and not len(world.plans[-1].swap_ins)
    for other in world.lanes:
        world.deliver(other)
    world.run()
    assert whole(*streams)


def test_what_waits_swapped_resumes_on_another_lane_from_nothing() -> None:
    world, lane, streams = swapping()
    other = world.attach(blocks=30, host_blocks=20)
    world.turn()
    assert world.sequence(streams[1]).lane is other and not lane.host.num_held
    for each in world.lanes:
        world.deliver(each)
    world.run()
    assert whole(*streams)


def test_a_plan_that_reads_host_blocks_does_not_write_them() -> None:
    """An executor does swap-outs first. Who is preempted after another was swapped in finds the host still full."""
    world = World(preemption=Preemption.SWAP, prefix_caching=False)
    lane = world.attach(blocks=120, seats=3, host_blocks=8, model=card(max_len=300))
    (back,) = world.submit(24, 20, priority=1, ignore_eos=True)
    fillers = [world.submit(4, 50, ignore_eos=True)[0] for _ in range(2)]
    for _ in range(3):
        world.iterate()
    (long,) = world.submit(200, 20, ignore_eos=True)
    world.iterate()
    assert len(world.plans[-1].swap_outs) and world.sequence(back).state is State.WAITING
    world.abort(fillers[0])
    (low,) = world.submit(4, 30, priority=2, ignore_eos=True)
    while world.sequence(long).prefilling:
        world.iterate()
    assert world.sequence(low).state is State.RUNNING, "it passes one that waits for a long prefill"
    world.abort(fillers[1])
    world.submit(4, 9, priority=1, ignore_eos=True)
    world.turn()
    assert len(world.plans[-1].swap_ins) and world.sequence(low).state is State.WAITING
    assert not len(world.plans[-1].swap_outs) and world.sequence(low).swapped is None
    assert lane.host.num_available == 8, "the plan is sealed"
    world.deliver(lane)
    world.run()
    assert whole(back, long, low)


def test_what_comes_back_from_the_host_is_shared_only_when_its_iteration_is_back() -> None:
    world = World(preemption=Preemption.SWAP)
    lane = world.attach(blocks=12, seats=2, host_blocks=12)
    prompt = [3 + i % 30 for i in range(14)]
    (low,) = world.submit(prompt, 20, priority=1, ignore_eos=True)
    for _ in range(3):
        world.iterate()
    (high,) = world.submit(40, 8, ignore_eos=True)
    while not high.over:
        world.iterate()
    assert world.sequence(low).swapped is not None
    assert not lane.prefix_hit(world.sequence(low)), "its blocks on the device were evicted"
    (twin,) = world.submit(prompt, 2, priority=1, ignore_eos=True)
    world.turn()
    resumed, other = world.plans[-1].new
    assert len(world.plans[-1].swap_ins) and resumed.computed > 14 and other.computed == 0
    world.deliver(lane)
    world.abort(twin)
    (later,) = world.submit(prompt, 2, priority=1, ignore_eos=True)
    world.turn()
    assert world.sequence(later).cached_tokens == 12, "now it is found"
    world.deliver(lane)
    world.run()
    assert whole(low, later)


# --- none ---


def test_without_preemption_nobody_gives_way_and_everybody_ends() -> None:
    chance = random.Random(4)
    for admission in Admission:
        world = World(preemption=Preemption.NONE, admission=admission)
        world.attach(blocks=14, seats=6)
        streams = []
        for _ in range(60):
            priority = chance.randrange(3)
            streams += world.submit(chance.choice([3, 9]), chance.choice([2, 12, 30]), priority=priority)
            world.iterate()
        world.run()
        assert whole(*streams) and totals(world.scheduler).preemptions == 0


# --- admission ---


def test_more_than_may_ever_wait_is_refused_and_not_asked_to_come_back() -> None:
    world = World(max_waiting=3)
    world.attach()
    for stream in world.submit(4, 2, n=4):
        assert stream.ended is not None and stream.ended.reason == EndReason.REJECTED
    assert all(not stream.over for stream in world.submit(4, 2, n=3))
    world.run()


@pytest.mark.parametrize("kv", KvLayout)
@pytest.mark.parametrize("preemption", Preemption)
def test_what_can_never_fit_is_refused_and_what_just_fits_is_served(kv: KvLayout, preemption: Preemption) -> None:
    for admission in Admission:
        world = World(kv=kv, preemption=preemption, admission=admission)
        world.attach(blocks=8, host_blocks=8)
        (too_much,), (largest,) = world.submit(20, 14), world.submit(20, 13, ignore_eos=True)
        (small,) = world.submit(5, 3, ignore_eos=True)
        assert too_much.ended is not None and too_much.ended.reason == EndReason.REJECTED
        world.run()
        assert whole(largest, small)


def load(admission: Admission) -> tuple[float, int, int]:
    """Mean number of running sequences, preemptions and endings, once lengths are known: answers have 16 tokens on
    average and could have 200."""
    world = World(admission=admission, prefix_caching=False)
    lane = world.attach(blocks=60, seats=64, budget=256, model=card(max_len=256))
    running, counters = 0, world.scheduler.counters
    for i in range(700):
        while len(world.scheduler.queues["m"]) < 8:
            world.submit(8, 200)
        world.iterate()
        if i == 300:
            preemptions, ended = totals(world.scheduler).preemptions, counters.ended.total()
        running += lane.num_running if i > 300 else 0
    return running / 399, totals(world.scheduler).preemptions - preemptions, counters.ended.total() - ended


def test_learned_lengths_fill_the_pool_and_preempt_seldom() -> None:
    predicted, immediate, worst = load(Admission.PREDICTED), load(Admission.IMMEDIATE), load(Admission.WORST_CASE)
    assert predicted[0] > 5 * worst[0] and worst[1] == 0
    assert predicted[1] < immediate[1] / 2 and predicted[1] <= 0.04 * predicted[2]
    assert predicted[2] > 0.8 * immediate[2]


@pytest.mark.parametrize("admission", Admission)
@pytest.mark.parametrize("preemption", GIVE_WAY)
def test_nobody_is_seated_who_forces_a_preemption_in_the_next_plan(
    admission: Admission, preemption: Preemption
) -> None:
    chance = random.Random(5)
    for _ in range(12):
        world = World(admission=admission, preemption=preemption, watermark=0.0, prefix_caching=False)
        world.attach(blocks=chance.randrange(9, 30), seats=8, host_blocks=8, budget=chance.choice([8, 64]))
        after: list[tuple[int, int]] = []
        for _ in range(60):
            for _ in range(chance.choice([0, 1, 3])):
                world.submit(chance.choice([3, 4, 8, 12]), chance.choice([1, 6, 20]), ignore_eos=True)
            if world.iterate():
                after.append((len(world.plans[-1].new), totals(world.scheduler).preemptions))
        for (seated, before), (_, now) in pairwise(after):
            assert not seated or now == before
