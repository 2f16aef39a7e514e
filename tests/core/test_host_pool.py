"""Host blocks of swapped sequences."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.core.host_pool import HostPool


def test_blocks_are_handed_out_once() -> None:
    pool = HostPool(5)
    one, two = pool.allocate(2), pool.allocate(3)
    assert one is not None and two is not None and sorted(one + two) == list(range(5))
    assert pool.allocate(1) is None and pool.allocate(0) == [] and pool.num_held == 5
    pool.check_invariants([one, two])


def test_a_released_block_is_free_only_after_the_plan_is_sealed() -> None:
    pool = HostPool(3)
    table = pool.allocate(2)
    assert table is not None
    pool.release(table)
    assert pool.num_available == 1 and pool.num_held == 0 and pool.allocate(2) is None
    pool.check_invariants([])
    pool.settle()
    assert pool.num_available == 3 and pool.allocate(3) is not None
    pool.settle()
    assert pool.num_available == 0, "settled once"


def test_too_large_a_wish_takes_nothing() -> None:
    pool = HostPool(3)
    assert pool.allocate(4) is None and pool.num_available == 3 and pool.num_held == 0


def test_a_release_too_many_is_found() -> None:
    pool = HostPool(3)
    table = pool.allocate(1)
    assert table is not None
    pool.release(table)
    for again in (table, [2]):
        with pytest.raises(AssertionError, match="released but not held"):
            pool.release(again)


def test_invariants_find_a_wrong_table() -> None:
    pool = HostPool(4)
    table = pool.allocate(2)
    assert table is not None
    for tables in ([], [table[:1]], [table, table], [[*table, 3]]):
        with pytest.raises(AssertionError):
            pool.check_invariants(tables)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10), st.lists(st.tuples(st.sampled_from(["allocate", "release", "settle"]), st.integers(0, 6))))
def test_the_pool_does_what_three_sets_do(num_blocks: int, steps: list[tuple[str, int]]) -> None:
    pool = HostPool(num_blocks)
    free, released = set(range(num_blocks)), set[int]()
    tables: list[list[int]] = []
    for step, number in steps:
        if step == "allocate":
            table = pool.allocate(number)
            assert (table is None) == (number > len(free))
            if table is not None:
                assert len(set(table)) == number and set(table) <= free
                free -= set(table)
                tables.append(table)
        elif step == "release" and tables:
            table = tables.pop(number % len(tables))
            pool.release(table)
            released |= set(table)
        elif step == "settle":
            pool.settle()
            free, released = free | released, set()
        pool.check_invariants(tables)
        assert pool.num_available == len(free) and pool.num_held == sum(map(len, tables))
