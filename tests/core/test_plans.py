"""What stands in a plan: chunks, shares of the token budget, preemption, bytes on the wire, and refusals."""

from __future__ import annotations

import pytest

from common.wire import EndReason, Plan, decode, encode
from scheduler_svc.core import SchedulerConfig, State
from tests.core.model_executor import card
from tests.core.stream import Stream, whole
from tests.core.totals import totals
from tests.core.world import World


def chunks(world: World, stream: Stream) -> list[int]:
    """Prefill lengths of one stream, plan by plan; for worlds with one lane and no reuse of slots."""
    found = []
    slots = {}
    for plan in world.plans:
        slots.update({new.slot: tuple(new.tokens[: new.prompt_length].tolist()) for new in plan.new})
        for slot, length in zip(plan.prefills.tolist(), plan.prefill_lengths.tolist(), strict=True):
            if slots[slot] == tuple(stream.prompt):
                found.append(length)
    return found


# --- chunks (C26) ---


@pytest.mark.parametrize(
    ("cap", "budget", "expected"),
    [
        (0, 64, [30]),
        (1, 64, [1] * 30),
        (7, 64, [7, 7, 7, 7, 2]),
        (4, 64, [4] * 7 + [2]),
        (0, 16, [16, 14]),
        (7, 5, [5] * 6),
        (29, 64, [29, 1]),
        (30, 64, [30]),
    ],
)
def test_a_prompt_is_computed_in_chunks_and_the_answer_is_the_same(cap: int, budget: int, expected: list[int]) -> None:
    for block_size in (1, 4, 7, 32):
        world = World(max_prefill_chunk=cap)
        world.attach(blocks=128, block_size=block_size, budget=budget)
        (stream,) = world.submit(30, 10, ignore_eos=True)
        world.run()
        assert chunks(world, stream) == expected and whole(stream)


def test_the_answer_is_the_same_alone_in_a_batch_and_after_a_prefix_hit() -> None:
    """The world compares every token with a run alone; here the runs differ in all ways at once."""
    for config in (SchedulerConfig(), SchedulerConfig(max_prefill_chunk=3), SchedulerConfig(prefix_caching=False)):
        for size, blocks in ((1, 90), (4, 24), (16, 6)):
            world = World(config)
            world.attach(blocks, size, seats=6)
            streams = [
                stream
                for i in range(12)
                for stream in world.submit([2 + i % 3, *range(3, 3 + 2 * (i % 7))], 9, n=1 + i % 2, temperature=1.0)
            ]
            world.run()
            assert whole(*streams)


# --- the share of the budget (C17) ---


def test_decodes_come_first_and_prefill_fills_the_rest_exactly() -> None:
    world = World()
    world.attach(blocks=512, budget=16, seats=8, model=card(max_len=512))
    decoding = [world.submit(3, 100, ignore_eos=True)[0] for _ in range(5)]
    for _ in range(3):
        world.iterate()
    world.submit(110, 1)
    for _ in range(10):
        world.iterate()
    sizes = [(len(plan.decodes), int(plan.prefill_lengths.sum())) for plan in world.plans[-10:]]
    assert sizes == [(5, 11)] * 10
    assert all(len(stream.tokens) == len(decoding[0].tokens) for stream in decoding)


def test_eight_long_prompts_and_a_stream_of_short_ones_share_the_budget() -> None:
    world = World()
    lane = world.attach(blocks=4096, block_size=16, seats=64, budget=64, model=card(max_len=8192))
    (victim,) = world.submit(4, 2000, ignore_eos=True)
    world.iterate()
    longs = [world.submit(4096, 1)[0] for _ in range(8)]
    arrivals: list[tuple[int, Stream]] = []
    waits: list[int] = []
    plans = 0
    while not longs[0].over:
        arrivals.append((plans, world.submit(5, 2, ignore_eos=True)[0]))
        world.iterate()
        plans += 1
        waits += [plans - since for since, stream in arrivals if stream.tokens and not stream.over]
        assert len(victim.tokens) == plans + 1, "the running stream missed an iteration"
    assert max(waits) <= 4, "a short prompt waits behind long ones"
    assert plans <= -(-4096 // 31) + 4, "the long one is sure of half of the budget"
    assert all(len(plan.decodes) + int(plan.prefill_lengths.sum()) <= 64 for plan in world.plans)
    assert sum(sequence.is_long for sequence in lane.running()) <= 1, "one long prefill at a time"


def test_what_is_long_depends_on_the_smallest_budget() -> None:
    world = World()
    lane = world.attach(budget=64)
    (middle,) = world.submit(17, 1)
    assert world.sequence(middle).is_long
    world.iterate()
    world.attach(budget=16)
    (small,) = world.submit(5, 1)
    assert world.sequence(small).is_long
    world.run()
    assert lane in world.lanes and whole(middle, small)


def test_a_chunk_cap_leaves_the_rest_of_the_budget_to_others() -> None:
    """What is kept for a long prefill is no more than it may take."""
    world = World(max_prefill_chunk=8)
    world.attach(blocks=512, budget=64, seats=8, model=card(max_len=512))
    world.submit(200, 1)
    shorts = [world.submit(8, 1)[0] for _ in range(7)]
    world.iterate()
    assert int(world.plans[0].prefill_lengths.sum()) == 64 and all(stream.over for stream in shorts)


def test_a_long_prompt_of_a_higher_class_does_not_wait_for_a_lower_one() -> None:
    world = World()
    world.attach(blocks=512, budget=64, seats=8, model=card(max_len=512))
    (low,) = world.submit(400, 1, priority=1)
    world.iterate()
    (high,) = world.submit(100, 1, priority=0)
    (equal,) = world.submit(100, 1, priority=1)
    world.iterate()
    assert world.sequence(high).state is State.RUNNING and world.sequence(equal).state is State.WAITING
    while not high.over:
        assert world.iterate()
    assert len(world.plans) <= 4 and not low.over and not equal.over
    world.run()
    assert whole(low, high, equal)


def test_budget_below_the_seats_bounds_the_seats() -> None:
    world = World(max_num_seqs=50)
    lane = world.attach(seats=40, budget=3)
    assert lane.seats == 3
    streams = [world.submit(4, 5)[0] for _ in range(9)]
    world.run()
    assert whole(*streams)


def test_the_lower_of_configured_and_announced_limits_counts() -> None:
    world = World(max_num_seqs=4, max_num_batched_tokens=32)
    lane = world.attach(seats=8, budget=16)
    assert (lane.seats, lane.token_budget) == (4, 16)
    lane = world.attach(seats=2, budget=64)
    assert (lane.seats, lane.token_budget) == (2, 32)


# --- preemption (C07) ---


def test_of_the_blocks_the_oldest_are_served_and_the_newest_goes() -> None:
    world = World()
    lane = world.attach(blocks=7, seats=4)
    streams = [world.submit(8, 12, ignore_eos=True)[0] for _ in range(3)]
    while totals(world.scheduler).preemptions == 0:
        assert world.iterate()
    numbers = sorted(s.number for s in lane.running())
    assert numbers == [stream.number for stream in streams][: len(numbers)]
    world.run()
    assert whole(*streams)
    assert [stream.ended.cached_tokens for stream in streams if stream.ended] == [0, 0, 0], "of the first admission"


def test_preemption_repeats_no_logprob_and_no_prompt_logprob_is_missing() -> None:
    world = World(max_prefill_chunk=3)
    world.attach(blocks=12, seats=6)
    streams = [
        world.submit(6 + i, 16, ignore_eos=True, logprobs=2, prompt_logprobs=1, temperature=1.0, seed=i)[0]
        for i in range(6)
    ]
    world.run()
    assert whole(*streams) and totals(world.scheduler).preemptions >= 2
    world.check_idle()


def test_a_preempted_sequence_finds_its_own_blocks_again() -> None:
    world = World()
    lane = world.attach(blocks=40, seats=1)
    (low,) = world.submit(16, 20, priority=1, ignore_eos=True)
    for _ in range(4):
        world.iterate()
    (high,) = world.submit(4, 2, ignore_eos=True)
    world.run()
    resumed = [new for plan in world.plans for new in plan.new if len(new.tokens) > new.prompt_length]
    assert len(resumed) == 1 and resumed[0].computed >= 16 and whole(low, high)
    assert world.executors[lane.epoch].computed_tokens < 16 + 20 + 4 + 2 + 4


def test_a_victim_that_shares_the_newcomers_prefix_frees_less_room() -> None:
    """Its blocks that the newcomer hits are needed again at once, and count for nothing."""
    world = World()
    world.attach(blocks=20)
    prefix = list(range(2, 26))
    (low,) = world.submit([*prefix, 30, 31, 32], 3, priority=1, ignore_eos=True)
    others = [world.submit(19, 5, ignore_eos=True)[0] for _ in range(2)]
    world.iterate()
    (high,) = world.submit([*prefix, *range(3, 20)], 5, ignore_eos=True)
    world.run()
    assert whole(low, high, *others)
    world.check_idle()


# --- bytes ---


@pytest.mark.parametrize("rows", [1, 8, 64, 256])
def test_a_steady_decode_plan_costs_two_bytes_a_row(rows: int) -> None:
    world = World(max_num_batched_tokens=4096)
    lane = world.attach(blocks=2 * rows, block_size=64, seats=rows, budget=4096, model=card(max_len=128))
    for _ in range(rows):
        world.submit(4, 40, ignore_eos=True)
    world.iterate()
    for _ in range(10):
        plan = world.plan(lane)
        assert plan is not None and len(plan.decodes) == rows
        assert len(encode(plan)) <= 200 + 2 * rows
        world.deliver(lane)


def test_a_row_that_crosses_a_block_edge_costs_its_slot_and_the_block() -> None:
    world = World()
    lane = world.attach()
    world.submit(4, 20, ignore_eos=True)
    sizes = []
    for _ in range(9):
        plan = world.plan(lane)
        assert plan is not None
        sizes.append((len(encode(plan)), plan.appended_slots.tolist()))
        world.deliver(lane)
    plain = min(size for size, _ in sizes)
    assert [slots for _, slots in sizes] == [[], [0], [], [], [], [0], [], [], []]
    assert all(size - plain <= 10 for size, _ in sizes[1:])


def test_plans_travel_unchanged() -> None:
    world = World(max_prefill_chunk=5)
    world.attach(blocks=14, seats=4)
    for i in range(8):
        world.submit(5 + i, 8, priority=i % 2, seed=2**64 - 1 - i, bias_ids=[3], bias_values=[1.5])
    while True:
        world.turn()
        if not world.out:
            break
        for lane in world.lanes:
            sent = world.out[lane.epoch].plan
            assert isinstance(sent, Plan) and decode(encode(sent)) == sent
            world.deliver(lane)


# --- refusals ---


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "text"),
    [
        ([5] * 40, 9, "prompt and max_tokens make 49 tokens, the model's context holds 48"),
        ([5] * 20, 20, "need KV for 39 tokens, the largest pool holds 32"),
        ([5, 40], 3, "outside the vocabulary"),
        ([5, -1], 3, "outside the vocabulary"),
        ([5, 6], 0, "max_tokens must be at least 1"),
    ],
)
def test_what_can_never_be_served_is_refused_at_once(prompt: list[int], max_tokens: int, text: str) -> None:
    world = World()
    world.attach(blocks=8)
    (stream,) = world.submit(prompt, max_tokens)
    assert stream.ended is not None and stream.ended.reason == EndReason.REJECTED and text in stream.ended.message
    assert not world.scheduler.live and not world.turn()
    (largest,) = world.submit([39] * 20, 13)
    world.run()
    assert whole(largest)


def test_each_sequence_of_a_request_has_a_seed_of_its_own() -> None:
    world = World()
    world.attach()
    streams = world.submit(6, 8, n=4, temperature=1.0, seed=2**64 - 2, ignore_eos=True)
    world.run()
    assert whole(*streams) and len({tuple(stream.tokens) for stream in streams}) > 1
    seeds = [new.params.seed for plan in world.plans for new in plan.new]
    assert seeds == [2**64 - 2, 2**64 - 1, 0, 1]


def test_everybody_is_told_of_the_end_of_the_service() -> None:
    world = World()
    lane = world.attach(seats=1)
    streams = [world.submit(4, 9)[0] for _ in range(3)]
    world.turn()
    world.scheduler.end_all(EndReason.SHUTDOWN, "the service is stopping", world.now)
    world.read_outbox(None)
    assert all(stream.ended is not None and stream.ended.reason == EndReason.SHUTDOWN for stream in streams)
    world.deliver(lane)
    world.check_idle()
