"""Who shares an iteration and how KV is laid out: request batching, separate phases, contiguous runs, paced prefill."""

from __future__ import annotations

import heapq
from typing import Any

import pytest

from common.wire import Plan
from scheduler_svc.core import Lane, State, WaitReason
from scheduler_svc.core.config import Admission, Batching, KvLayout, Preemption, Prefill
from tests.core.model_executor import card
from tests.core.stream import whole
from tests.core.totals import totals
from tests.core.world import World

AZURE = [(374, 44), (396, 109), (879, 55), (91, 16), (91, 16), (381, 84), (1313, 142), (388, 84), (242, 14), (209, 152)]
"""Prompts and answers of the first conversations of the Azure LLM inference trace of 2023."""


def table(world: World, lane: Lane, names: dict[int, str]) -> list[str]:
    """Who is in each iteration."""
    rows = []
    while world.turn():
        rows.append("".join(sorted(names[number] for number in world.members(lane))))
        world.deliver(lane)
    return rows


# --- request batching ---


def test_under_request_batching_the_finished_leave_and_nobody_joins() -> None:
    world = World(batching=Batching.REQUEST)
    lane = world.attach(seats=4)
    lengths = (6, 4, 2, 5, 3, 3, 2)
    streams = [world.submit(3, length, ignore_eos=True)[0] for length in lengths]
    names = {stream.number: "ABCDEFG"[i] for i, stream in enumerate(streams)}
    assert table(world, lane, names) == ["ABCD", "ABCD", "ABD", "ABD", "AD", "A", "EFG", "EFG", "EF"]


def test_a_batch_is_held_whatever_is_free_and_says_so() -> None:
    world = World(batching=Batching.REQUEST)
    lane = world.attach(seats=4)
    (member,) = world.submit(3, 9, ignore_eos=True)
    world.iterate()
    (high,) = world.submit(3, 2, priority=-1, ignore_eos=True)
    while not member.over:
        assert not high.tokens
        world.turn()
        assert world.scheduler.why(world.sequence(high)) is WaitReason.POLICY
        world.deliver(lane)
    world.iterate()
    assert high.tokens


def test_a_batch_takes_all_seats_though_their_prompts_take_several_iterations() -> None:
    world = World(batching=Batching.REQUEST)
    lane = world.attach(seats=3, budget=16, blocks=200)
    streams = [world.submit(20, 5, ignore_eos=True)[0] for _ in range(5)]
    world.iterate()
    assert {s.stream for s in lane.running()} == {stream.number for stream in streams[:3]}
    world.run()
    assert whole(*streams)


def list_scheduling(lengths: list[int], seats: int) -> int:
    """Iterations when each free seat takes the next answer at once."""
    ends = [0] * seats
    for length in lengths:
        heapq.heapreplace(ends, ends[0] + length)
    return max(ends)


def test_iterations_needed_for_a_real_mix_of_answers() -> None:
    """Answers of 14 to 152 tokens: who is held to the longest of four wastes seats."""
    counts = {}
    lengths = [answer for _, answer in AZURE]
    for batching in Batching:
        world = World(batching=batching, max_num_batched_tokens=4096, long_prefill_threshold=4096)
        world.attach(seats=4, blocks=512, block_size=16, budget=4096, model=card(max_len=2048))
        for prompt, answer in AZURE:
            world.submit(prompt, answer, ignore_eos=True)
        counts[batching] = world.run()
    assert counts[Batching.REQUEST] == sum(max(lengths[i : i + 4]) for i in range(0, len(lengths), 4)) == 403
    assert counts[Batching.ITERATION] == list_scheduling(lengths, 4) == 268


# --- separate phases ---


def kind(plan: Plan) -> str:
    return "prefill" * bool(len(plan.prefills)) + "decode" * bool(len(plan.decodes))


def test_an_iteration_holds_prefills_or_decodes() -> None:
    world = World(prefill=Prefill.SEPARATE)
    world.attach(seats=4, budget=16)
    streams = [world.submit(10, 4, ignore_eos=True)[0] for _ in range(6)]
    world.run()
    assert {kind(plan) for plan in world.plans} == {"prefill", "decode"} and whole(*streams)


def test_decodes_stand_aside_by_policy_and_not_for_ever() -> None:
    """However many prompts arrive: each that is prefilled takes a seat until it has decoded."""
    world = World(prefill=Prefill.SEPARATE, long_prefill_threshold=100)
    lane = world.attach(seats=6, budget=16, blocks=512, model=card(max_len=100))
    (victim,) = world.submit(4, 60, ignore_eos=True)
    world.iterate()
    gaps, gap = [0], 0
    while not victim.over:
        for _ in range(2):
            world.submit(24, 3, ignore_eos=True)
        seen = len(victim.tokens)
        world.turn()
        aside = kind(world.plans[-1]) == "prefill"
        assert world.scheduler.why(world.sequence(victim)) is (WaitReason.POLICY if aside else WaitReason.NONE)
        world.deliver(lane)
        gap = gap + 1 if len(victim.tokens) == seen else 0
        gaps.append(gap)
    assert 0 < max(gaps) <= -(-5 * 24 // 16), "the other five seats are prefilled, then all decode"


# --- contiguous KV ---


def contiguous(**changes: Any) -> tuple[World, Lane]:
    world = World(kv=KvLayout.CONTIGUOUS, **changes)
    return world, world.attach(blocks=20, seats=8)


def test_the_whole_length_is_one_run_from_the_start() -> None:
    world, lane = contiguous()
    (stream,) = world.submit(6, 15, ignore_eos=True)
    world.turn()
    (new,) = world.plans[-1].new
    assert new.blocks.tolist() == list(range(new.blocks[0], new.blocks[0] + 5)), "(6 + 15 - 1) / 4"
    world.deliver(lane)
    world.run()
    assert not any(len(plan.appended_slots) for plan in world.plans) and whole(stream)


def test_scattered_room_is_no_room() -> None:
    world, lane = contiguous()
    keepers = [world.submit(6, 11, ignore_eos=True)[0] for _ in range(5)]
    world.iterate()
    world.abort(keepers[1], keepers[3])
    (big,) = world.submit(6, 20, ignore_eos=True)
    world.turn()
    assert lane.pool.num_available == 8 and lane.num_blocks_for(25) == 7
    assert world.scheduler.why(world.sequence(big)) is WaitReason.KV_BLOCKS
    world.deliver(lane)
    world.abort(keepers[2])
    world.turn()
    assert world.sequence(big).state is State.RUNNING, "the gaps have joined"
    world.deliver(lane)
    world.run()
    world.check_idle()


def test_runs_are_not_shared() -> None:
    world, _ = contiguous()
    prompt = list(range(2, 20))
    for _ in range(3):
        (stream,) = world.submit(prompt, 3)
        world.run()
        assert whole(stream) and stream.ended is not None and stream.ended.cached_tokens == 0
    assert all(new.computed == 0 for plan in world.plans for new in plan.new)


def test_nothing_is_preempted_for_blocks_that_were_reserved() -> None:
    for preemption in Preemption:
        world, _ = contiguous(preemption=preemption, admission=Admission.IMMEDIATE)
        streams = [world.submit(6, 30, ignore_eos=True)[0] for _ in range(9)]
        world.run()
        assert whole(*streams) and totals(world.scheduler).preemptions == 0


# --- chunks off ---


def test_without_chunks_a_prompt_is_cut_only_where_it_must_be() -> None:
    world = World(chunked_prefill=False)
    world.attach(seats=8, budget=16, blocks=200)
    streams = [world.submit(length, 3, ignore_eos=True)[0] for length in (10, 10, 6, 40, 5)]
    world.run()
    prefills = [plan.prefill_lengths.tolist() for plan in world.plans if len(plan.prefills)]
    assert prefills == [[10, 6], [10], [13], [15], [12], [5]], "only what exceeds the whole budget is cut"
    assert whole(*streams)


# --- prefill paced by a time between tokens ---

BASE, PER_DECODE, PER_PREFILL = 0.005, 0.0001, 0.0002
"""Seconds of an iteration of the simulated executor."""


def paced(target_itl_ms: float) -> list[tuple[int, int, float]]:
    """Decodes, prefill tokens and seconds of each iteration, with eight streams beside an endless row of prompts."""
    world = World(target_itl_ms=target_itl_ms, prefix_caching=False, long_prefill_threshold=10_000)
    lane = world.attach(blocks=4000, block_size=16, seats=16, budget=512, model=card(max_len=1024))
    for _ in range(8):
        world.submit(4, 900, ignore_eos=True)
    rows = []
    for _ in range(250):
        while len(world.scheduler.queues["m"]) < 3:
            world.submit(300, 5, ignore_eos=True)
        world.turn()
        plan = world.plans[-1]
        decodes, prefill = len(plan.decodes), int(plan.prefill_lengths.sum())
        rows.append((decodes, prefill, BASE + PER_DECODE * decodes + PER_PREFILL * prefill))
        world.now += rows[-1][2]
        world.deliver(lane)
    return rows[50:]


def test_iterations_stay_within_the_target_and_prefill_takes_what_it_allows() -> None:
    rows = paced(20.0)
    riding = [(decodes, prefill, seconds) for decodes, prefill, seconds in rows if decodes and prefill]
    assert len(riding) > 100
    assert max(seconds for _, _, seconds in riding) <= 0.020 * 1.1
    allowed = [(0.020 - BASE - PER_DECODE * decodes) / PER_PREFILL for decodes, _, _ in riding]
    assert sum(prefill for _, prefill, _ in riding) >= 0.85 * sum(allowed)


def test_without_a_target_prefill_takes_the_whole_budget() -> None:
    assert max(seconds for _, _, seconds in paced(0.0)) > 0.1
    assert World().config.target_itl_ms == 0.0


@pytest.mark.parametrize("target_itl_ms", [0.1, 5.0])
def test_a_target_that_cannot_be_met_still_lets_prompts_get_on(target_itl_ms: float) -> None:
    rows = paced(target_itl_ms)
    assert all(prefill == 16 for decodes, prefill, _ in rows if decodes and prefill and prefill >= 16)
    assert sum(prefill for _, prefill, _ in rows) >= 15 * len(rows)


def test_prefills_go_on_when_the_decodes_whose_turn_it_is_all_give_way() -> None:
    """The lane once had running sequences and no plan."""
    world = World(prefill=Prefill.SEPARATE, max_prefill_chunk=1, watermark=0.0, long_prefill_threshold=1000)
    world.attach(blocks=53, seats=4, budget=2, model=card(max_len=400))
    (low,) = world.submit(4, 30, ignore_eos=True)
    world.iterate()
    world.iterate()
    (high,) = world.submit(200, 2, priority=-1, ignore_eos=True)
    while not low.over:
        world.iterate()
    assert whole(low, high) and totals(world.scheduler).preemptions == 1
