"""Faults that systems of this kind have had, with the right behaviour; the numbers are those of the list of cases."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from common.wire import EndReason, Inquiry, SamplingParams, Submit
from scheduler_svc.core import LaneError, State, WaitReason, account_of
from scheduler_svc.core.config import KvLayout, Preemption
from tests.core.model_executor import card
from tests.core.stream import Stream
from tests.core.totals import totals
from tests.core.world import World


def served(stream: Stream) -> bool:
    return stream.ended is not None and stream.ended.reason in (EndReason.EOS, EndReason.LENGTH)


def refused(stream: Stream) -> bool:
    return stream.ended is not None and stream.ended.reason == EndReason.REJECTED


# C02


def test_a_result_twice_or_of_another_iteration_is_an_error_and_changes_nothing() -> None:
    world = World()
    lane = world.attach()
    (stream,) = world.submit(6, 5, ignore_eos=True)
    world.turn()
    result = world.out[lane.epoch].result
    world.deliver(lane)
    with pytest.raises(LaneError):
        world.scheduler.apply(lane, result, world.now)
    world.run()
    assert served(stream)
    world.check_idle()


def test_aborts_are_idempotent_and_late_tokens_are_dropped() -> None:
    world = World()
    lane = world.attach()
    (leaver,), (stayer,) = world.submit(6, 20, ignore_eos=True), world.submit(7, 20, ignore_eos=True)
    world.turn()
    (waiting,) = world.submit(8, 20)
    waiting.aborted = leaver.aborted = True
    for _ in range(2):
        world.scheduler.abort(0, [leaver.number, waiting.number, 12345, leaver.number, waiting.number], world.now)
    world.deliver(lane)
    assert leaver.tokens == [] and len(stayer.tokens) == 1
    world.run()
    world.check_idle()


# C04


def test_what_can_never_fit_is_refused_and_the_largest_that_fits_is_served() -> None:
    world = World()
    world.attach(blocks=8, block_size=16, budget=256, model=card(max_len=512))
    (too_long,), (too_much,) = world.submit(200, 4), world.submit(100, 100)
    assert refused(too_long) and refused(too_much)
    (largest,), (small,) = world.submit(128, 1), world.submit(5, 3)
    world.run()
    assert served(largest) and served(small)
    branches = world.submit(100, 29, n=4, ignore_eos=True)
    (small,) = world.submit(5, 3)
    world.run()
    assert served(small) and all(served(branch) for branch in branches)
    world.check_idle()


def test_five_that_each_fill_the_pool_finish_one_by_one() -> None:
    world = World()
    world.attach(blocks=8, block_size=16, budget=256, model=card(max_len=512))
    giants = [world.submit(118, 10, ignore_eos=True)[0] for _ in range(5)]
    world.run()
    assert all(served(giant) for giant in giants)
    assert totals(world.scheduler).preemptions == 0
    world.check_idle()


# C05, C06


def test_two_hundred_rounds_of_aborts_at_every_stage_leave_nothing() -> None:
    chance = random.Random(6)
    world = World(max_num_batched_tokens=16)
    lane = world.attach(blocks=24, seats=2, budget=16)
    for _ in range(200):
        streams = [
            stream
            for _ in range(chance.randint(1, 3))
            for stream in world.submit(chance.randint(1, 40), chance.randint(1, 6), n=chance.choice((1, 1, 4)))
        ]
        for _ in range(chance.randint(0, 12)):
            if not world.turn():
                break
            if chance.random() < 0.4:
                world.abort(*chance.sample(streams, chance.randint(1, len(streams))))
            if lane.epoch in world.out:
                world.deliver(lane)
        world.abort(*[stream for stream in streams if stream.ended is None])
        assert not world.scheduler.live
        assert world.scheduler.plan(lane, world.now) is None, "a plan for nobody"
        world.check_idle()


# C07


def test_preempted_sequences_are_recomputed_and_say_the_same() -> None:
    world = World()
    world.attach(blocks=18, seats=6)
    streams = [world.submit(8, 24, ignore_eos=True)[0] for _ in range(6)]
    world.run()
    assert totals(world.scheduler).preemptions >= 2
    assert all(len(stream.tokens) == 24 for stream in streams)
    world.check_idle()


@pytest.mark.parametrize("preemption", [Preemption.RECOMPUTE, Preemption.SWAP])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 7}, {"logprobs": 2}, {"prompt_logprobs": 1}])
def test_six_on_a_pool_for_three_lose_and_repeat_nothing(preemption: Preemption, params: dict[str, Any]) -> None:
    """The world compares each token, logprob and its place with a run alone; executors compare each KV entry."""
    world = World(preemption=preemption)
    world.attach(blocks=60, seats=6, host_blocks=60, model=card(max_len=100))
    streams = [world.submit(10, 64, ignore_eos=True, **params)[0] for _ in range(6)]
    preempted: set[int] = set()
    while world.iterate():
        world.check()
        preempted |= {s.number for s in world.scheduler.live.values() if s.num_preemptions}
    assert len(preempted) >= 2
    for stream in streams:
        assert len(stream.tokens) == 64 and served(stream)
        assert stream.ended is not None and stream.ended.cached_tokens == 0, "of the first admission, never its own"
    counters = world.scheduler.counters
    assert totals(world.scheduler)[1:3] == (60, 6 * 64)
    assert (counters.swapped_in_blocks > 0) == (preemption is Preemption.SWAP)
    world.check_idle()


# C13


@pytest.mark.parametrize("chunk", [0, 4, 1])
def test_a_prefix_is_shared_as_far_as_it_was_acknowledged(chunk: int) -> None:
    """Three and a half blocks, computed in chunks; a second request comes after each iteration."""
    prompt = [3 + i % 30 for i in range(14)]
    for count in range(16):
        world = World(max_prefill_chunk=chunk)
        world.attach(seats=8)
        world.submit(prompt, 2)
        for _ in range(count):
            world.iterate()
        computed = min(14, count * (chunk or 14))
        world.submit([*prompt, 5], 2)
        world.turn()
        (new,) = [new for new in world.plans[-1].new if len(new.tokens) == 15]
        assert new.computed == computed // 4 * 4
        for lane in world.lanes:
            world.deliver(lane)
        world.run()


def test_an_aborted_iteration_publishes_what_it_computed_and_no_more() -> None:
    world = World(max_prefill_chunk=6)
    lane = world.attach()
    prompt = [3 + i % 30 for i in range(14)]
    (leaver,) = world.submit(prompt, 2)
    world.turn()
    world.abort(leaver)
    world.deliver(lane)
    world.submit(prompt, 2)
    world.turn()
    assert world.plans[-1].new[0].computed == 4
    world.deliver(lane)
    world.run()


def test_of_two_copies_of_a_block_one_may_go() -> None:
    world = World()
    world.attach()
    prompt = [3 + i % 30 for i in range(14)]
    (short,), (long,) = world.submit(prompt, 2, ignore_eos=True), world.submit(prompt, 20, ignore_eos=True)
    while not short.over:
        world.iterate()
    (later,) = world.submit(prompt, 2)
    world.run()
    assert later.ended is not None and later.ended.cached_tokens == 12 and served(long)


def test_a_prefix_is_shared_only_after_the_iteration_that_wrote_it_is_back() -> None:
    world = World()
    lane = world.attach()
    prompt = [3 + i % 30 for i in range(14)]
    burst = [world.submit(prompt, 2)[0] for _ in range(8)]
    world.turn()
    assert all(item.computed == 0 for item in world.plans[-1].new)
    world.deliver(lane)
    world.run()
    (later,) = world.submit(prompt, 2)
    world.run()
    assert later.ended is not None and later.ended.cached_tokens == 12
    assert all(served(stream) for stream in burst)


def test_a_lost_iteration_publishes_nothing() -> None:
    world = World()
    prompt = [3 + i % 30 for i in range(14)]
    lane = world.attach()
    world.submit(prompt, 2)
    world.turn()
    world.lose(lane)
    world.attach()
    world.turn()
    assert world.plans[-1].new[0].computed == 0
    world.run()


# C17


def test_a_long_prompt_never_stops_a_stream_and_a_newcomer_is_quick() -> None:
    world = World(max_num_batched_tokens=64)
    lane = world.attach(blocks=4096, block_size=16, seats=64, budget=64, model=card(max_len=8192))
    (victim,) = world.submit(4, 600, ignore_eos=True)
    world.iterate()
    longs = [world.submit(4096, 1)[0] for _ in range(9)]
    for _ in range(10):
        world.iterate()
    (newcomer,) = world.submit(5, 1)
    for _ in range(4):
        world.iterate()
    assert newcomer.ended is not None, "the newcomer waits behind the long prompts"
    # One token an iteration, whatever is prefilled beside it.
    assert len(victim.tokens) == 15
    assert all(len(plan.decodes) + int(plan.prefill_lengths.sum()) <= 64 for plan in world.plans)
    needed = 0
    while longs[0].ended is None:
        world.iterate()
        needed += 1
    assert 14 + needed <= -(-4096 // 63) + 4, "the first long prompt is slowed down"
    assert lane.num_running >= 1


# C18


def test_a_higher_class_starts_at_once_and_the_last_of_the_lowest_goes() -> None:
    world = World()
    lane = world.attach(seats=2)
    first, second = (world.submit(6, 30, priority=5, ignore_eos=True)[0] for _ in range(2))
    for _ in range(3):
        world.iterate()
    (high,) = world.submit(6, 4, priority=0, ignore_eos=True)
    world.turn()
    assert set(world.members(lane)) == {first.number, high.number}
    assert world.sequence(second).state is State.WAITING
    world.deliver(lane)
    world.run()
    world.check_idle()


def test_equal_classes_do_not_take_turns_in_preempting_each_other() -> None:
    world = World()
    world.attach(blocks=15, seats=4)
    for _ in range(30):
        world.submit(8, 30, ignore_eos=True)
    generated = 0
    for _ in range(1000):
        if not world.iterate():
            break
        assert totals(world.scheduler).generation_tokens > generated, "an iteration without a token"
        generated = totals(world.scheduler).generation_tokens
    assert totals(world.scheduler).preemptions <= 3 * 30
    world.check_idle()


def test_the_preempted_resumes_before_a_newcomer_of_its_class() -> None:
    world = World()
    world.attach(blocks=9, seats=4)
    elder, younger = (world.submit(8, 24, ignore_eos=True)[0] for _ in range(2))
    while totals(world.scheduler).preemptions == 0:
        assert world.iterate()
    assert world.sequence(younger).state is State.WAITING
    (newcomer,) = world.submit(4, 2, ignore_eos=True)
    while world.sequence(younger).state is State.WAITING:
        assert not newcomer.tokens, "the newcomer overtook the preempted one"
        assert world.iterate()
    world.run()
    assert served(elder) and served(younger) and served(newcomer)


# C19


def test_a_cold_request_is_not_passed_for_ever_by_cached_ones() -> None:
    world = World()
    world.attach(blocks=40, seats=4)
    hot = [5 + i % 20 for i in range(20)]
    for _ in range(4):
        world.submit(hot, 4, ignore_eos=True)
    (cold,) = world.submit(30, 4, ignore_eos=True)
    iterations = 0
    while not cold.tokens:
        world.submit(hot, 4, ignore_eos=True)
        world.iterate()
        iterations += 1
    assert iterations <= 8, "first come, first served, within a class"


# C20, C29


@pytest.mark.parametrize("preemption", Preemption)
@pytest.mark.parametrize("kv", KvLayout)
def test_blocks_of_an_aborted_sequence_are_not_given_away_while_its_iteration_is_out(
    preemption: Preemption, kv: KvLayout
) -> None:
    world = World(preemption=preemption, kv=kv)
    lane = world.attach(blocks=6, seats=4, host_blocks=6)
    (holder,) = world.submit(20, 3)
    world.turn()
    world.abort(holder)
    (next_one,) = world.submit(20, 3)
    world.check_fence(lane)
    assert world.scheduler.why(world.sequence(next_one)) is not WaitReason.NONE
    world.deliver(lane)
    world.run()
    assert served(next_one)
    world.check_idle()


def test_a_late_result_of_a_lost_lane_is_refused() -> None:
    """Its memory may be in use by the lane that took its place."""
    world = World()
    zombie = world.attach()
    (stream,) = world.submit(20, 3, ignore_eos=True)
    world.turn()
    late = world.out[zombie.epoch].result
    world.lose(zombie)
    lane = world.attach()
    assert lane.epoch > zombie.epoch
    world.turn()
    with pytest.raises(LaneError):
        world.scheduler.apply(zombie, late, world.now)
    assert not world.scheduler.outbox and not stream.tokens
    world.deliver(lane)
    world.run()
    assert served(stream)


def test_a_lost_lane_costs_no_token_and_nothing_is_planned_for_it() -> None:
    world = World()
    one, other = world.attach(), world.attach()
    streams = [world.submit(6, 12, ignore_eos=True)[0] for _ in range(8)]
    for _ in range(4):
        world.iterate()
    assert one.num_running == other.num_running == 4
    world.turn()
    world.lose(one)
    world.run()
    assert all(len(stream.tokens) == 12 for stream in streams)
    world.check_idle()


def test_a_seat_is_taken_in_the_very_next_plan() -> None:
    world = World()
    lane = world.attach(seats=4)
    lengths = (6, 4, 2, 5, 3, 3, 2)
    streams = [world.submit(3, length, ignore_eos=True)[0] for length in lengths]
    names = {stream.number: "ABCDEFG"[i] for i, stream in enumerate(streams)}
    table = []
    while world.turn():
        table.append("".join(sorted(names[number] for number in world.members(lane))))
        world.deliver(lane)
    assert table == ["ABCD", "ABCD", "ABDE", "ABDE", "ADEF", "AFG", "FG"]
    assert [sum(name in row for row in table) for name in "ABCDEFG"] == list(lengths)


def test_one_id_for_all_requests_costs_the_core_little() -> None:
    """An account of 4,096 sequences kept the core from its plans for 90 ms, and any client may ask for 64 at a time."""
    world = World(max_num_seqs=1)
    world.attach()
    streams = range(2000)
    for stream in streams:
        request = Submit(stream, 1, "same", "m", np.array([5, 6, 7], np.int32), SamplingParams(1))
        world.scheduler.submit(0, request, world.now)
    account = account_of(world.scheduler, Inquiry(1, "same"), world.now)
    assert (account.num_waiting, len(account.sequences)) == (2000, 256)
    world.scheduler.abort(0, reversed(streams), world.now)
    assert not world.scheduler.by_request and not world.scheduler.live
