"""When a process that ends is started again."""

from __future__ import annotations

from scheduler_svc.restarts import Restarts


def made() -> Restarts:
    return Restarts(first_delay_s=0.5, longest_delay_s=3.0, stable_s=10.0)


def test_the_delay_doubles_up_to_the_longest() -> None:
    restarts, now, delays = made(), 100.0, []
    for _ in range(6):
        restarts.started(now)
        delays.append(restarts.ended(now + 1.0))
        assert restarts.due_at == now + 1.0 + delays[-1]
        now = restarts.due_at
    assert delays == [0.0, 0.5, 1.0, 2.0, 3.0, 3.0]


def test_one_that_has_lived_long_enough_begins_anew() -> None:
    restarts = made()
    for lived, delay in ((1.0, 0.0), (1.0, 0.5), (10.0, 1.0), (10.1, 0.0), (1.0, 0.5)):
        restarts.started(50.0)
        assert restarts.ended(50.0 + lived) == delay


def test_the_longest_delay_stays_however_often_it_ends() -> None:
    restarts = made()
    for _ in range(3000):
        restarts.started(0.0)
        delay = restarts.ended(0.0)
    assert delay == 3.0
