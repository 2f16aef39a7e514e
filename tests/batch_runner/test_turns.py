"""Whose turn it is, how many may run, and when a batch pauses."""

from __future__ import annotations

from itertools import pairwise

import pytest

from common.wire import Stats
from scheduler_svc.batch_runner.idle_seats import IdleSeats
from scheduler_svc.batch_runner.live_batch import MAX_BACKOFF_S, MIN_BACKOFF_S, LiveBatch
from scheduler_svc.batch_runner.models_seen import ModelsSeen
from scheduler_svc.batch_runner.rota import Rota
from scheduler_svc.batches.records import BatchRecord, Line, Status

RECORD = BatchRecord("b", "", Status.IN_PROGRESS.value, "/v1/completions", "f", "24h", *[None] * 6, 0, 1)  # type: ignore[arg-type]


def test_tenants_take_turns_and_so_do_the_batches_of_each() -> None:
    rota = Rota()
    rota.update([("a1", "A"), ("a2", "A"), ("a3", "A"), ("b1", "B")])
    turns = [rota.next(lambda _batch: True) for _ in range(8)]
    assert turns.count("b1") == 4
    assert {turns.count(batch) for batch in ("a1", "a2", "a3")} <= {1, 2}
    assert all(one != other for one, other in pairwise(turns))


def test_who_is_not_ready_loses_no_turn_to_itself_and_who_has_gone_has_none() -> None:
    rota = Rota()
    rota.update([("a", "A"), ("b", "B")])
    assert [rota.next(lambda batch: batch == "b") for _ in range(3)] == ["b"] * 3
    assert rota.next(lambda _batch: False) is None
    rota.update([("b", "B"), ("c", "B")])
    assert {rota.next(lambda _batch: True) for _ in range(4)} == {"b", "c"}


def stats(live: float, waiting: float = 0, *, seats: float = 8, ready: bool = True, stopping: bool = False) -> Stats:
    half = {'gilir_seats{engine="0"}': seats / 2, 'gilir_seats{engine="1"}': seats / 2}
    return Stats(ready, stopping, {**half, "gilir_live_sequences": live, "vllm:num_requests_waiting": waiting})


@pytest.mark.parametrize(
    ("told", "own", "room"),
    [
        (None, 0, 0),
        (stats(0), 0, 6),
        (stats(3), 0, 5),
        (stats(7), 0, 1),
        (stats(9), 0, 0),
        (stats(6), 4, 6),
        (stats(8), 4, 4),
        (stats(8, 2), 4, 4),
        (stats(8, 5), 4, 0),
        (stats(0, ready=False), 0, 0),
        (stats(0, stopping=True), 0, 0),
        (stats(0, seats=0), 0, 0),
    ],
)
def test_lines_get_the_seats_that_nobody_else_has_or_waits_for(told: Stats | None, own: int, room: int) -> None:
    assert IdleSeats(6).room(told, own) == room


def test_what_is_started_after_a_beat_is_not_counted_against_it() -> None:
    seats, told = IdleSeats(6), stats(3)
    assert [seats.room(told, own) for own in (0, 2, 5)] == [5, 5, 5]


def lines(*numbers: int) -> list[Line]:
    return [Line(number, str(number), 0, 1) for number in numbers]


def test_a_batch_pauses_twice_as_long_each_time_and_at_least_as_told() -> None:
    batch, now = LiveBatch(RECORD), 100.0
    batch.add(lines(1, 2))
    assert batch.is_ready(now) and batch.take().number == 1
    batch.put_back(lines(1)[0], now, 0)
    assert not batch.is_ready(now + MIN_BACKOFF_S * 0.9)
    for pause in (MIN_BACKOFF_S, 2 * MIN_BACKOFF_S, 4 * MIN_BACKOFF_S):
        now += pause
        assert batch.is_ready(now) and batch.take().number == 1
        batch.put_back(lines(1)[0], now, 0)
    now += 8 * MIN_BACKOFF_S
    batch.put_back(batch.take(), now, 20)
    assert not batch.is_ready(now + 19) and batch.is_ready(now + 20)
    batch.went_well()
    batch.put_back(batch.take(), now + 20, 10_000)
    assert batch.is_ready(now + 20 + MAX_BACKOFF_S)


def test_several_lines_refused_at_once_are_one_pause() -> None:
    batch = LiveBatch(RECORD)
    batch.add(lines(1, 2, 3))
    taken = [batch.take() for _ in range(3)]
    for line in taken:
        batch.put_back(line, 100.0, 0)
    assert batch.is_ready(100.0 + MIN_BACKOFF_S)


def test_a_batch_is_done_when_all_lines_are_read_and_none_is_left() -> None:
    batch = LiveBatch(RECORD)
    assert batch.needs_lines and not batch.is_done
    batch.add(lines(1))
    batch.take()
    assert not batch.is_done and batch.last_number == 1
    batch.add([])
    assert batch.is_done and not batch.needs_lines
    batch.give_back(lines(1)[0])
    assert not batch.is_done


def test_a_model_that_is_not_served_is_waited_for_a_while() -> None:
    class Model:
        def __init__(self, name: str) -> None:
            self.name = name

    seen = ModelsSeen(10)
    assert seen.may_come("m", 1000)
    seen.look([Model("m")], 100)  # type: ignore[list-item]
    seen.look([Model("other")], 150)  # type: ignore[list-item]
    assert seen.may_come("m", 109) and not seen.may_come("m", 110)
    assert seen.may_come("never", 109) and not seen.may_come("never", 110)
