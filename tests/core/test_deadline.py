"""The deadline of an iteration: learned from measured ones, between a floor and a limit."""

from __future__ import annotations

import pytest

from scheduler_svc.core.pacing import MIN_OBSERVED, SLACK, Deadline, Pace

FLOOR, LIMIT = 10.0, 60.0


def pace(*observed: tuple[int, float]) -> Pace:
    """One that has seen iterations of so many tokens and seconds, each often enough."""
    learned = Pace()
    for tokens, seconds in observed:
        for _ in range(MIN_OBSERVED):
            learned.observe(0, tokens, seconds, fit=False)
    return learned


def test_the_limit_holds_before_anything_is_learned() -> None:
    learned = Pace()
    for _ in range(MIN_OBSERVED - 1):
        learned.observe(4, 0, 0.01, fit=False)
        assert learned.deadline(4, FLOOR, LIMIT) == (LIMIT, "limit")
    learned.observe(4, 0, 0.01, fit=False)
    assert learned.deadline(4, FLOOR, LIMIT) == (FLOOR, "floor")


@pytest.mark.parametrize(
    ("seconds", "deadline"),
    [(0.01, Deadline(FLOOR, "floor")), (1.0, Deadline(SLACK, "learned")), (4.0, Deadline(LIMIT, "limit"))],
)
def test_it_lies_between_the_floor_and_the_limit(seconds: float, deadline: Deadline) -> None:
    assert pace((8, seconds)).deadline(8, FLOOR, LIMIT) == deadline


def test_a_limit_below_the_floor_wins() -> None:
    assert pace((8, 0.001)).deadline(8, FLOOR, 3.0) == (3.0, "limit")


def test_a_larger_iteration_than_any_seen_has_time_in_proportion() -> None:
    learned = pace((8, 0.6))
    assert learned.deadline(8, FLOOR, 1000.0).seconds == pytest.approx(12.0)
    assert learned.deadline(32, FLOOR, 1000.0).seconds == pytest.approx(48.0)
    assert learned.deadline(2048, FLOOR, LIMIT) == (LIMIT, "limit")


def test_a_large_iteration_says_nothing_of_small_ones_but_small_ones_of_large_ones() -> None:
    learned = pace((1000, 2.0), (4, 0.1))
    assert learned.deadline(4, FLOOR, LIMIT) == (FLOOR, "floor")
    assert learned.deadline(1, FLOOR, LIMIT) == (LIMIT, "limit"), "nothing so small was seen"
    slow = pace((1000, 0.1), (4, 1.0))
    assert slow.deadline(1000, FLOOR, LIMIT) == (SLACK, "learned"), "no iteration is quicker than a smaller one"


def test_a_slow_phase_raises_it_and_kills_nobody() -> None:
    """Each iteration takes twice as long as the one before, up to what the limit forbids."""
    learned = pace((8, 0.02))
    seconds = 0.02
    while seconds < LIMIT:
        assert seconds < learned.deadline(8, FLOOR, LIMIT).seconds
        learned.observe(8, 0, seconds, fit=False)
        seconds *= 2
    assert learned.slowest_s > LIMIT / 2


def test_a_slow_phase_is_forgotten_slowly() -> None:
    learned = pace((8, 2.0))
    for _ in range(100):
        learned.observe(8, 0, 0.02, fit=False)
    assert learned.deadline(8, FLOOR, LIMIT).seconds > 30
    for _ in range(5000):
        learned.observe(8, 0, 0.02, fit=False)
    assert learned.deadline(8, FLOOR, LIMIT) == (FLOOR, "floor")
