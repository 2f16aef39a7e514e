"""Iteration-level scheduling seen from outside: who is in the plans, and when seats change hands."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common.wire import encode
from executor_svc.fake import FakeExecutor


def members(fake: FakeExecutor) -> list[set[int]]:
    """The first prompt token of each sequence in each plan; tests give every request another one."""
    resident: dict[int, int] = {}
    found = []
    for plan in fake.plans:
        for item in plan.new:
            resident[item.slot] = int(item.tokens[0])
        found.append({resident[slot] for slot in [*plan.decodes.tolist(), *plan.prefills.tolist()]})
    return found


def test_a_finished_sequence_is_replaced_in_the_very_next_plan(start: Callable[..., Any]) -> None:
    stack = start("--max-num-seqs", "4")
    fake = stack.fake()
    stack.ready()
    fake.hold()
    lengths = {101: 12, 102: 7, 103: 3, 104: 9, 105: 6, 106: 5, 107: 4}
    with ThreadPoolExecutor(len(lengths)) as pool:
        for first, length in lengths.items():
            pool.submit(stack.text, [first, 11, 12], length)
            waiting = first - 101
            stack.until(lambda n=waiting + 1: stack.metric("gilir_live_sequences") == n, "the request to arrive")
        fake.release()
    plans = members(fake)
    # The first plan left with the first request alone; from the second on, all seats are taken while anyone waits.
    assert plans[0] == {101}
    done_after = {first: max(i for i, plan in enumerate(plans) if first in plan) for first in lengths}
    for index, plan in enumerate(plans[1:], start=1):
        waiting = {first for first in lengths if not any(first in earlier for earlier in plans[: index + 1])}
        assert len(plan) == 4 or not waiting, f"plan {index}: a seat is empty while {waiting} wait"
        for first in plan - plans[index - 1]:
            came_with_start = index == 1
            freed = any(done_after[other] == index - 1 for other in lengths)
            assert came_with_start or freed, f"{first} entered plan {index} though nobody left before"
    # A row is in exactly as many plans as it has tokens: prefill gives the first.
    assert {first: sum(first in plan for plan in plans) for first in lengths} == lengths
    stack.until_idle()


def test_a_steady_decode_row_costs_two_bytes(start: Callable[..., Any]) -> None:
    stack = start()
    fake = stack.fake(max_num_seqs=64, num_blocks=1024)
    stack.ready()
    answer = stack.complete([[200 + i, 5] for i in range(64)], 20)
    assert answer.status_code == 200
    steady = [plan for plan in fake.plans if len(plan.decodes) == 64 and not len(plan.appended_slots)]
    assert steady and all(len(encode(plan)) <= 200 + 2 * 64 for plan in steady)


def test_the_scheduler_loads_no_torch(start: Callable[..., Any]) -> None:
    stack = start()
    stack.fake()
    stack.ready()
    assert "torch" not in Path(f"/proc/{stack.scheduler.pid}/maps").read_text()
