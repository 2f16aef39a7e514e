"""Contiguous KV: runs of blocks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.core.run_pool import RunPool


def test_the_first_run_that_fits_is_taken() -> None:
    pool = RunPool(10)
    one, two, three = pool.allocate(3), pool.allocate(2), pool.allocate(4)
    assert (one, two, three) == ([0, 1, 2], [3, 4], [5, 6, 7, 8])
    pool.release(two)
    pool.release(one)
    assert pool.largest_run == 5 and pool.num_available == 6 and pool.num_referenced == 4
    assert pool.allocate(1) == [0] and pool.allocate(4) == [1, 2, 3, 4] and pool.allocate(1) == [9]
    pool.check_invariants([three, [0], [1, 2, 3, 4], [9]])


def test_scattered_blocks_make_no_run() -> None:
    pool = RunPool(9)
    tables = [pool.allocate(3) for _ in range(3)]
    pool.release(tables[0])
    pool.release(tables[2])
    assert pool.num_available == 6 and pool.largest_run == 3
    assert pool.fits(3) and not pool.fits(4)
    with pytest.raises(ValueError, match="a run of 4 blocks wanted, the largest has 3"):
        pool.allocate(4)
    assert pool.num_available == 6
    assert pool.fits(9, tables[1]) and not pool.fits(10, tables[1])
    pool.release(tables[1])
    assert pool.allocate(9) == list(range(9)) and pool.largest_run == 0 and pool.allocate(0) == []


def test_runs_that_would_be_released_count_where_they_join() -> None:
    pool = RunPool(12)
    tables = [pool.allocate(3) for _ in range(4)]
    pool.release(tables[1])
    assert pool.fits(6, tables[0]) and pool.fits(6, tables[2]) and pool.fits(9, [*tables[2], *tables[0]])
    assert pool.fits(4, tables[3]) is False and pool.fits(3, tables[3]) and not pool.fits(7, tables[2])


def test_nothing_is_cached() -> None:
    pool = RunPool(4)
    table = pool.allocate(2)
    pool.publish_many([table[0]], [b"one"])
    pool.publish_many(table, [b"one", b"two"])
    assert pool.lookup([b"one", b"two"]) == [] and pool.num_cached == 0 and pool.num_evictable([]) == 0
    assert pool.num_releasable(table) == 2
    pool.share([])
    with pytest.raises(ValueError, match="cannot be shared"):
        pool.share(table)
    pool.release(table)
    assert pool.num_available == 4


def test_a_release_too_many_is_found() -> None:
    pool = RunPool(6)
    table = pool.allocate(4)
    pool.release(table[1:3])
    for again in ([1], [2, 3], [0, 1], table, [5]):
        with pytest.raises(AssertionError, match="released more often than held"):
            pool.release(again)
    pool.check_invariants([[0], [3]])


def test_invariants_find_a_wrong_table() -> None:
    pool = RunPool(6)
    table = pool.allocate(3)
    for tables in ([], [table[:2]], [table, [3]], [table, table], [[0, 2, 1]]):
        with pytest.raises(AssertionError):
            pool.check_invariants(tables)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 30), st.data())
def test_the_pool_does_what_a_row_of_flags_does(num_blocks: int, data: st.DataObject) -> None:
    pool, taken, tables = RunPool(num_blocks), [False] * num_blocks, []
    for _ in range(data.draw(st.integers(0, 20))):
        if tables and data.draw(st.booleans()):
            table = tables.pop(data.draw(st.integers(0, len(tables) - 1)))
            for size in (len(table), len(table) + 3):
                assert pool.fits(size, table) == (first_run(taken, size, freed=set(table)) is not None)
            pool.release(table)
            for block in table:
                taken[block] = False
        else:
            count = data.draw(st.integers(1, 8))
            start = first_run(taken, count)
            assert pool.fits(count) == (start is not None)
            if start is None:
                with pytest.raises(ValueError, match="wanted"):
                    pool.allocate(count)
                continue
            tables.append(pool.allocate(count))
            assert tables[-1] == list(range(start, start + count))
            taken[start : start + count] = [True] * count
        pool.check_invariants(tables)
        assert pool.num_available == taken.count(False)
        assert first_run(taken, pool.largest_run) is not None and first_run(taken, pool.largest_run + 1) is None


def first_run(taken: list[bool], count: int, freed: set[int] = frozenset()) -> int | None:  # type: ignore[assignment]
    """Where the first run of `count` free blocks begins."""
    for start in range(len(taken) - count + 1):
        if all(not taken[block] or block in freed for block in range(start, start + count)):
            return start
    return None
