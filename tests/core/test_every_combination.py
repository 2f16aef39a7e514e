"""Every combination of choices keeps the invariants, ends every stream once, and gives the answers of a run alone.

By default combinations that cover every pair of values; with HYPOTHESIS_PROFILE=nightly all, 10,000 steps each:

    HYPOTHESIS_PROFILE=nightly python -m pytest -n auto tests/core/test_every_combination.py

A failure names a call of `walk` that is that failure again.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from itertools import combinations, product

import pytest

from tests.core.walk import AXES, Combination, walk

NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
WALKS, STEPS = (40, 250) if NIGHTLY else (5, 50)
"""Histories of each combination, and steps of each history. Limits and what stands beside the combination are drawn
anew for each."""

Place = tuple[int, str]
"""An axis and one of its values."""


def pairs_of(row: tuple[str, ...]) -> Iterator[tuple[Place, Place]]:
    return combinations(enumerate(row), 2)


def all_pairs() -> set[tuple[Place, Place]]:
    return {pair for row in product(*AXES) for pair in pairs_of(row)}


def covering_rows() -> list[tuple[str, ...]]:
    """Few rows with every pair of values in one of them: of some at random, always that with the most new pairs."""
    chance, missing, rows = random.Random(1), all_pairs(), []
    while missing:
        drawn = [tuple(chance.choice(axis) for axis in AXES) for _ in range(200)]
        (first, one), (second, two) = min(missing)
        drawn = [tuple({first: one, second: two}.get(i, value) for i, value in enumerate(row)) for row in drawn]
        best = max(drawn, key=lambda row: len(missing.intersection(pairs_of(row))))
        missing.difference_update(pairs_of(best))
        rows.append(best)
    return rows


ROWS = list(product(*AXES)) if NIGHTLY else covering_rows()


def make(row: tuple[str, ...]) -> Combination:
    return Combination.parse("-".join(row))


def test_the_rows_cover_every_pair_and_are_few() -> None:
    rows = covering_rows()
    assert {pair for row in rows for pair in pairs_of(row)} == all_pairs()
    assert len(rows) <= 24


@pytest.mark.timeout(1800 if NIGHTLY else 180)
@pytest.mark.parametrize("combination", [str(make(row)) for row in ROWS])
def test_it_holds_what_always_holds(combination: str) -> None:
    for seed in range(WALKS):
        walk(combination, seed=seed, steps=STEPS)
