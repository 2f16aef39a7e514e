"""Limits of API keys: calls at a time and tokens a minute, exact over all frontends, whatever happens in between."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from common.wire import EndReason, KeyLimits
from scheduler_svc.core.key_usage import MIN_SWEEP
from scheduler_svc.plan_log.player import Player
from tests.core.model_executor import card
from tests.core.stream import Stream
from tests.core.totals import totals
from tests.core.world import World
from tests.scheduler.recorded import RecordedWorld

TWO = KeyLimits("two", max_concurrent=2)


def world(**changes: object) -> World:
    made = World(**changes)
    made.attach(blocks=400, seats=8, budget=256, model=card(max_len=200))
    return made


def accepted(streams: list[Stream]) -> bool:
    return streams[0].accepted


def refusal(streams: list[Stream], *words: str) -> int:
    """That all streams were refused for the limit; returns Retry-After in seconds."""
    for stream in streams:
        ended = stream.ended
        assert ended is not None and ended.reason == EndReason.OVER_LIMIT
        assert all(word in ended.message for word in words)
    assert streams[0].ended is not None
    return streams[0].ended.retry_after_s


def test_calls_at_a_time_count_over_frontends_until_they_end() -> None:
    w = world()
    first, second = w.submit(3, 2, owner=0, limits=TWO), w.submit(3, 9, owner=1, limits=TWO)
    assert refusal(w.submit(3, 2, owner=2, limits=TWO), "2 requests at a time") == 1
    assert accepted(w.submit(3, 2, limits=KeyLimits("another", max_concurrent=1))) and accepted(w.submit(3, 2))
    while not first[0].over:
        w.iterate()
    assert not second[0].over
    third = w.submit(3, 2, limits=TWO)
    assert accepted(third) and not accepted(w.submit(3, 2, limits=TWO))
    w.abort(*third)
    assert accepted(w.submit(3, 2, limits=TWO))
    w.abort_owner(1)
    assert accepted(w.submit(3, 2, limits=TWO))
    w.run()
    w.check_idle()
    assert accepted(w.submit(3, 2, limits=TWO)) and accepted(w.submit(3, 2, limits=TWO))


def test_a_call_with_many_sequences_and_prompts_is_one() -> None:
    w = world()
    one = KeyLimits("one", max_concurrent=1, call=7)
    parts = [w.submit(3, 2, n=4, limits=one), w.submit(5, 9, n=2, limits=one)]
    assert all(map(accepted, parts)) and not accepted(w.submit(3, 2, limits=KeyLimits("one", 1, call=8)))
    assert not accepted(w.submit(3, 2, owner=1, limits=one)), "that number is another call at another frontend"
    w.abort(*parts[0], parts[1][0])
    assert not accepted(w.submit(3, 2, limits=KeyLimits("one", 1, call=8)))
    w.abort(parts[1][1])
    assert accepted(w.submit(3, 2, limits=KeyLimits("one", 1, call=8)))


def test_a_lost_executor_frees_no_place() -> None:
    w = world()
    w.submit(3, 9, limits=TWO), w.submit(3, 9, limits=TWO)
    w.turn()
    w.lose(w.lanes[0])
    assert not accepted(w.submit(3, 2, limits=TWO))
    w.attach(blocks=64)
    w.run()
    assert accepted(w.submit(3, 2, limits=TWO))


def test_a_prompt_is_charged_at_once_and_answers_as_they_come() -> None:
    w = world()
    slow = KeyLimits("slow", tokens_per_minute=60)
    assert accepted(w.submit(40, 9, n=2, ignore_eos=True, limits=slow))
    assert refusal(w.submit(30, 1, limits=slow), "60 tokens a minute") == 10  # 20 are left: the prompt counted once
    assert accepted(w.submit(12, 1, limits=slow))
    w.run()
    # 8 less 2 * 9 and 1 generated ones is a debt of 11.
    assert refusal(w.submit(4, 1, limits=slow)) == 15
    w.now += 14.9
    assert refusal(w.submit(4, 1, limits=slow)) == 1
    w.now += 0.1
    assert accepted(w.submit(4, 1, limits=slow)), "just when it was told"
    assert accepted(w.submit(4, 1, limits=KeyLimits("other", tokens_per_minute=60)))


def test_a_prompt_larger_than_the_bucket_needs_a_full_one() -> None:
    w = world()
    slow = KeyLimits("slow", tokens_per_minute=20)
    assert accepted(w.submit(50, 1, limits=slow))
    assert refusal(w.submit(50, 1, limits=slow)) == 150
    w.now += 149
    assert not accepted(w.submit(50, 1, limits=slow))
    w.now += 1
    assert accepted(w.submit(50, 1, limits=slow))


def test_a_call_of_several_prompts_is_judged_whole() -> None:
    w = world()
    slow = KeyLimits("slow", tokens_per_minute=60)
    assert accepted(w.submit_call([20, 20], 1, limits=slow))
    assert refusal(w.submit_call([10, 10, 10], 1, limits=slow)) == 10
    assert accepted(w.submit_call([10, 10], 1, limits=slow)), "what was refused cost nothing"
    w.run()
    w.now += 64
    assert accepted(w.submit_call([40, 40, 40], 1, limits=slow)), "larger than the bucket, which is full"
    one = KeyLimits("one", max_concurrent=1)
    assert accepted(w.submit_call([3, 3], 9, limits=one)) and not accepted(w.submit_call([3, 3], 9, limits=one))


def test_what_is_refused_costs_nothing() -> None:
    w = world()
    limits = KeyLimits("k", 1, 60)
    bad = w.submit(10, 100_000, limits=limits)  # longer than the context
    assert bad[0].ended is not None and bad[0].ended.reason == EndReason.REJECTED
    assert accepted(w.submit(10, 1, limits=limits))
    assert refusal(w.submit(10, 1, limits=limits), "1 requests at a time")
    w.run()
    assert accepted(w.submit(49, 1, limits=limits)), "60 less one prompt of 10 and its token"


def test_a_changed_limit_holds_at_once_and_keeps_what_was_used() -> None:
    w = world()
    assert accepted(w.submit(50, 1, limits=KeyLimits("k", 0, 60)))
    assert not accepted(w.submit(20, 1, limits=KeyLimits("k", 0, 6000)))
    w.now += 0.1  # at the new rate ten tokens
    assert accepted(w.submit(20, 1, limits=KeyLimits("k", 0, 6000)))
    assert accepted(w.submit(20, 1, limits=KeyLimits("k", 9, 0)))
    assert accepted(w.submit(60, 1, limits=KeyLimits("k", 0, 60))), "a limit that is new begins with a full bucket"


@pytest.mark.parametrize("seed", range(2))
def test_over_time_a_key_gets_its_rate_and_no_more(seed: int) -> None:
    """A key that always asks: all that it gets, but for one minute's burst and the last answers, is rate x time."""
    w, draw = world(), random.Random(seed)
    limits, used, longest = KeyLimits("k", tokens_per_minute=1200), 0, 60
    start = w.now
    while w.now - start < 180:
        w.now += draw.choice([0.05, 0.3, 1.0])
        length = draw.randint(1, longest)
        if accepted(w.submit(length, draw.randint(1, 9), limits=limits)):
            used += length
        before = totals(w.scheduler).generation_tokens
        w.iterate()
        used += totals(w.scheduler).generation_tokens - before
    allowed = 1200 * (1 + (w.now - start) / 60)
    assert allowed - 1200 - longest < used < allowed + longest + 9 * 8 * 10
    w.run()


def test_rows_of_idle_keys_are_used_again() -> None:
    w = world()
    usage = w.scheduler.key_usage
    for i in range(5 * MIN_SWEEP):
        w.now += 2
        w.abort(*w.submit(1, 1, limits=KeyLimits(f"k{i}", 1, 60)))
    assert len(usage._row_of) <= MIN_SWEEP
    kept = w.submit(1, 9, limits=KeyLimits("kept", 1, 0))
    for i in range(2 * MIN_SWEEP):
        w.abort(*w.submit(1, 1, limits=KeyLimits(f"l{i}", 1, 0)))
    assert not accepted(w.submit(1, 1, limits=KeyLimits("kept", 1, 0))) and not kept[0].over
    w.check()


def test_a_log_with_limits_plays_to_the_same_decisions(tmp_path: Path) -> None:
    w = RecordedWorld(tmp_path)
    w.attach(blocks=64, seats=4)
    w.begin_segment()
    limits, refused = KeyLimits("k", 3, 300), 0
    for i in range(60):
        refused += not accepted(w.submit(4 + i % 9, 6, limits=limits))
        w.iterate()
        if i == 30:
            w.begin_segment()
    w.run()
    assert 0 < refused < 60
    player = Player(w.close())
    steps = list(player.steps())
    told = [message for step in steps for _, message in step.messages if getattr(message, "reason", 0)]
    assert sum(message.reason == EndReason.OVER_LIMIT for message in told) == refused
    alone = Player(player.segments[2].path)
    list(alone.steps())
    assert alone.num_iterations > 0
