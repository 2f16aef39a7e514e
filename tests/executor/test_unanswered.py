"""When a connection is given up on which Hellos find no answer."""

from __future__ import annotations

from executor_svc.unanswered import Unanswered


def waits(unanswered: Unanswered, count: int) -> list[float]:
    """Seconds until each of the next connections is given up."""
    found = []
    for _ in range(count):
        unanswered.dialled()
        assert not unanswered.gives_up(1e9), "nothing was asked"
        for tenth in range(10):
            unanswered.asked(tenth / 10)
        after = 1
        while not unanswered.gives_up(float(after)):
            after += 1
        found.append(after - 1.0)
    return found


def test_each_connection_is_given_twice_the_time_until_an_answer_comes() -> None:
    unanswered = Unanswered(5.0)
    assert waits(unanswered, 7) == [5, 10, 20, 40, 80, 120, 120]
    unanswered.answered()
    assert waits(unanswered, 2) == [5, 10]
    assert waits(Unanswered(500.0), 2) == [500, 500]
