"""The ring of iterations shows what the plan log holds, costs nothing while nobody looks, and forgets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.wire import BlockState, Fault, Iterations, Left, Plan, Watch, WireError, decode, encode
from common.wire.watching import MAX_BLOCKS_SEEN, MAX_ROWS, NOBODY
from scheduler_svc.core import Lane
from scheduler_svc.core.config import KvLayout
from scheduler_svc.watching import ring as ring_module
from scheduler_svc.watching import telling
from scheduler_svc.watching import watcher as watcher_module
from scheduler_svc.watching.ring import IterationRing
from scheduler_svc.watching.watcher import KEEP_S, Watcher
from tests.scheduler.logged_cells import Cell, LoggedCells, read_cells
from tests.scheduler.recorded import RecordedWorld, eventful, wander
from tests.scheduler.test_membership import Rig, result


class WatchedWorld(RecordedWorld):
    """Its ring is told what the membership tells it."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        super().__init__(folder, **changes)
        self.ring = IterationRing()
        self.answers: list[Iterations] = []
        self.is_asked = True

    def plan(self, lane: Lane) -> Plan | None:
        plan = super().plan(lane)
        if plan is not None:
            self.ring.planned(lane, plan, self.now)
        return plan

    def deliver(self, lane: Lane) -> None:
        outcome = self.out[lane.epoch].result
        super().deliver(lane)
        self.ring.applied(lane, outcome, self.now)
        self.ask()

    def lose(self, lane: Lane, guilty: tuple[int, ...] = (), reason: str = "lost") -> None:
        if lane.is_vacant and lane.draining:
            reason = ""
            self.ring.gone(lane)
        else:
            self.ring.lost(lane, reason, self.now)
        super().lose(lane, guilty, reason)
        self.ask()

    def ask(self) -> None:
        if self.is_asked:
            after = self.answers[-1].first + len(self.answers[-1].epochs) - 1 if self.answers else 0
            self.answers.append(answer_of(self.ring, after))


def answer_of(ring: IterationRing, after: int) -> Iterations:
    first, rows, sequences = ring.since(after, MAX_ROWS)
    message = Iterations(1, ring.newest, first, sequences=tuple(sequences), **telling.columns(rows))
    decoded = decode(encode(message))
    assert isinstance(decoded, Iterations)
    return decoded


class Seen:
    """Answers put together as a page does it."""

    def __init__(self, answers: list[Iterations]) -> None:
        self.cells: dict[tuple[int, int], dict[int, Cell]] = {}
        self.left: dict[tuple[int, int], set[tuple[str, int, Left]]] = {}
        self.lost: set[tuple[int, int]] = set()
        self.numbers: list[int] = []
        names: dict[int, tuple[str, int]] = {}
        for answer in answers:
            names |= {seen.sequence: (seen.request_id, seen.index) for seen in answer.sequences}
            self._take(answer, names)

    def _take(self, answer: Iterations, names: dict[int, tuple[str, int]]) -> None:
        decode_at = np.cumsum([0, *answer.num_decodes])
        prefill_at = np.cumsum([0, *answer.num_prefills])
        left_at = np.cumsum([0, *answer.num_left])
        for i, epoch in enumerate(answer.epochs.tolist()):
            at = epoch, int(answer.iterations[i])
            self.numbers.append(answer.first + i)
            cells: dict[int, Cell] = {}
            for k in range(decode_at[i], decode_at[i + 1]):
                name = names[int(answer.decode_sequences[k])]
                cells[int(answer.decode_slots[k])] = (*name, "decode", 1)
            for k in range(prefill_at[i], prefill_at[i + 1]):
                name, tokens = names[int(answer.prefill_sequences[k])], int(answer.prefill_lengths[k])
                cells[int(answer.prefill_slots[k])] = (*name, "prefill", tokens)
            # A loss with nothing in flight is a row of its own, under the number of the iteration before.
            self.cells[at] = self.cells.get(at) or cells
            self.left[at] = self.left.get(at, set()) | {
                (*names[int(answer.left_sequences[k])], Left(int(answer.left_how[k])))
                for k in range(left_at[i], left_at[i + 1])
            }
            if answer.lost[i]:
                self.lost.add(at)

    def of(self, *ways: Left) -> dict[tuple[int, int], set[tuple[str, int, Left]]]:
        chosen = {at: {one for one in left if one[2] in ways} for at, left in self.left.items()}
        return {at: left for at, left in chosen.items() if left}


def compare(seen: Seen, logged: LoggedCells) -> None:
    assert seen.numbers == list(range(1, len(seen.numbers) + 1)), "each iteration once, in order"
    planned = {at: cells for at, cells in seen.cells.items() if cells}
    in_flight = logged.cells.keys() - planned.keys()
    assert planned == {at: cells for at, cells in logged.cells.items() if at not in in_flight}
    assert seen.of(Left.EOS, Left.STOP_TOKEN, Left.LENGTH) == logged.finished


def test_an_eventful_run_is_shown_as_the_log_has_it(tmp_path: Path) -> None:
    world = eventful(WatchedWorld(tmp_path))
    logged, seen = read_cells(world.close()), Seen(world.answers)
    compare(seen, logged)
    assert logged.cells.keys() == {at for at, cells in seen.cells.items() if cells}
    preempted = {at: {one[:2] for one in left} for at, left in seen.of(Left.PREEMPTED).items()}
    assert preempted == logged.preempted and preempted
    assert seen.lost == logged.lost and seen.of(Left.FAILED_OVER) and seen.of(Left.ENDED)


@pytest.mark.parametrize("seed", range(4))
def test_random_histories_are_shown_as_the_log_has_them(tmp_path: Path, seed: int) -> None:
    world = WatchedWorld(tmp_path)
    wander(world, seed, 500)
    compare(Seen(world.answers), read_cells(world.close()))


def test_who_comes_later_is_told_all_that_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_module, "CAPACITY", 20)
    world = WatchedWorld(tmp_path)
    world.is_asked = False
    wander(world, 3, 400)
    ring, answers = world.ring, []
    while not answers or answers[-1].first + len(answers[-1].epochs) <= ring.newest:
        answers.append(answer_of(ring, answers[-1].first + len(answers[-1].epochs) - 1 if answers else 0))
    seen, logged = Seen(answers), read_cells(world.close())
    assert seen.numbers == list(range(ring.newest - 19, ring.newest + 1))
    assert all(cells == logged.cells[at] for at, cells in seen.cells.items() if cells)
    named = {name for cells in seen.cells.values() for name in [cell[:2] for cell in cells.values()]}
    assert len(ring._names) <= len(named) + 40, "names are forgotten with the rows"


def test_nothing_is_noted_until_somebody_asks_and_soon_after_nobody_does() -> None:
    rig = Rig()
    watcher = Watcher(rig.scheduler, rig.membership, newest=1000)
    rig.attach()
    rig.submit(max_tokens=9)
    plan = rig.plan(1.0)
    rig.receive(b"p", result(plan, 5), 1.1)
    assert rig.membership.ring is None
    first = watcher.answer(Watch(1, 0, status=True), 1.2)
    assert (first.number, first.newest, len(first.epochs)) == (1, 1000, 0)
    assert [(lane.name, lane.running, lane.blocks) for lane in first.lanes] == [("one", 1, 64)]
    rig.receive(b"p", result(rig.plan(2.0), 6), 2.25)
    answer = watcher.answer(Watch(2, first.newest), 2.3)
    assert answer.first == 1001 and answer.iterations.tolist() == [2] and answer.seconds.tolist() == [0.25]
    assert [seen.request_id for seen in answer.sequences] == ["r"]
    watcher.check(2.3 + KEEP_S)
    assert rig.membership.ring is not None
    watcher.check(2.4 + KEEP_S)
    assert rig.membership.ring is None
    assert watcher.answer(Watch(3, answer.newest), 20.0).first == 1002, "numbers do not come again"


@pytest.mark.parametrize("kv_layout", [*KvLayout])
@pytest.mark.parametrize("most", [MAX_BLOCKS_SEEN, 7])
def test_each_block_is_told_of_as_the_tables_have_it(tmp_path: Path, kv_layout: KvLayout, most: int) -> None:
    world = WatchedWorld(tmp_path, kv=kv_layout)
    seen_states: set[int] = set()

    def compare_blocks() -> None:
        for lane in world.lanes:
            told = telling.blocks(lane, most, with_holders=True)
            assert len(told.states) <= most and told.step == max(1, -(-lane.pool.num_blocks // most))
            holders: dict[int, set[int]] = {}
            for sequence in lane.running():
                for block in lane.table(sequence.slot):
                    holders.setdefault(block, set()).add(sequence.number)
            lent = {block for table in lane.lent.values() for block in table}
            for place, (state, sequence) in enumerate(zip(told.states.tolist(), told.sequences.tolist(), strict=True)):
                block = place * told.step
                held = len(holders.get(block, ()))
                assert sequence in holders.get(block, {NOBODY})
                if block not in lent:
                    assert (state == BlockState.SHARED, state == BlockState.HELD) == (held > 1, held == 1)
                seen_states.add(state)
            if told.step == 1:
                counts = np.bincount(told.states, minlength=4)
                assert counts[BlockState.CACHED] == lane.pool.num_cached_only
                assert counts[BlockState.FREE] == lane.pool.num_available - lane.pool.num_cached_only

    for seed in range(4):
        wander(world, seed, 60)
        compare_blocks()
    world.close()
    assert {BlockState.FREE, BlockState.HELD} <= seen_states
    assert (BlockState.CACHED in seen_states) == (kv_layout is KvLayout.PAGED)


def test_whose_the_blocks_are_is_not_sought_where_very_many_run(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    watcher = Watcher(rig.scheduler, rig.membership, newest=0)
    rig.attach()
    for _ in range(2):
        rig.submit(max_tokens=9)
    rig.plan(1.0)
    for most, wanted in ((2, 2), (1, 0)):
        monkeypatch.setattr(watcher_module, "MAX_HOLDERS", most)
        (told,) = watcher.answer(Watch(1, 0, status=True), 1.2).blocks
        assert len({*told.sequences.tolist()} - {NOBODY}) == wanted
        assert np.count_nonzero(told.states == BlockState.HELD) >= 2


def test_a_loss_and_the_queue_are_told_with_their_reasons() -> None:
    rig = Rig()
    watcher = Watcher(rig.scheduler, rig.membership, newest=0)
    watcher.answer(Watch(1, 0), 0.0)
    epoch = rig.attach()
    for _ in range(9):
        rig.submit()
    plan = rig.plan(1.0)
    told = watcher.answer(Watch(2, 0, status=True), 3.0)
    assert told.num_waiting == {"seats": 1} and [w.reason for w in told.waiting] == ["seats"]
    assert told.waiting[0].waited_s == pytest.approx(3.0)
    rig.receive(b"p", Fault(epoch, plan.iteration, np.empty(0, np.uint16), "oom", "no memory"), 3.5)
    lost = watcher.answer(Watch(3, 0), 3.6)
    assert lost.lost.tolist() == [1] and set(lost.left_how.tolist()) == {Left.FAILED_OVER} and len(lost.left_how) == 8
    assert [(lane.state, lane.reason, lane.running) for lane in lost.lanes] == [("lost", "fault: oom: no memory", 0)]


def test_columns_that_do_not_fit_are_refused() -> None:
    row = {"epochs": [1], "iterations": [1], "planned_at": [0.0], "seconds": [0.0], "lost": [0]}
    counts = {"num_decodes": [2], "num_prefills": [0], "num_left": [0]}
    columns = {name: np.array(values) for name, values in (row | counts).items()}
    with pytest.raises(WireError, match=r"num_decodes: do not add up"):
        decode(encode(Iterations(1, 1, 1, **columns)))
    with pytest.raises(WireError, match=r"columns of different lengths"):
        decode(encode(Iterations(1, 1, 1, **(columns | {"lost": np.array([0, 0])}))))
