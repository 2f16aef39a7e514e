"""What counts as a stall of the core's loop."""

from __future__ import annotations

from scheduler_svc.stalls import Stalls


def test_what_was_neither_waited_nor_computed_is_a_stall() -> None:
    stalls = Stalls()
    stalls.begin(100.0, 7.0)
    assert stalls.passed(105.0, 8.0, 0.5) == 3.5
    assert stalls.passed(105.25, 8.0, 0.25) == 0, "it has been told already"
    assert stalls.passed(105.3, 8.0, 0.25) == 0, "something came before the wait was over"


def test_a_loop_that_is_busy_all_the_time_does_not_stand_still() -> None:
    stalls = Stalls()
    stalls.begin(0.0, 0.0)
    assert [stalls.passed(float(turn), turn * 0.95, 0.0) for turn in range(1, 9)] == [0.0] * 8
