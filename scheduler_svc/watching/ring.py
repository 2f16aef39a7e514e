"""The newest iterations of all lanes, in columns: those of plans and results, which the core has anyway."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from common.wire import Left, Plan, Result, SeenLane, SeenSequence
from scheduler_svc.core import Lane, Sequence
from scheduler_svc.core.sequence import State

CAPACITY = 1024
"""Iterations that are kept, of all lanes together."""
LOW_32 = (1 << 32) - 1


@dataclass(slots=True, eq=False)
class Row:
    """One iteration. Slots and sequences are columns of the same order."""

    epoch: int
    iteration: int
    planned_at: float
    decodes: NDArray[np.uint16]
    decode_sequences: NDArray[np.uint32]
    prefills: NDArray[np.uint16]
    prefill_sequences: NDArray[np.uint32]
    prefill_lengths: NDArray[np.int32]
    samples: NDArray[np.uint16]
    """Slots of the prefills whose chunk is their last."""
    joined: list[SeenSequence]
    """Those that took a seat."""
    left: list[tuple[int, int, Left]]
    """(slot, sequence, how) of those that gave one up: before the iteration, or with it."""
    seconds: float = 0.0
    lost: bool = False


@dataclass(slots=True, eq=False)
class _Seats:
    """Who has which seat, as the executor was told. The lane itself is ahead of it: it seats while it plans."""

    numbers: NDArray[np.uint32]
    occupants: list[Sequence | None]
    preemptions: list[int]
    """How often each occupant had been preempted when it took its seat."""
    in_flight: Row | None = None

    def take(self, slot: int, sequence: Sequence) -> SeenSequence:
        number = sequence.number & LOW_32
        self.numbers[slot], self.occupants[slot] = number, sequence
        self.preemptions[slot] = sequence.num_preemptions
        return seen(sequence)

    def give_up(self, slot: int, how: Left | None = None) -> tuple[int, int, Left] | None:
        """Empty a seat; None if it was empty. Without `how`, what has become of its occupant tells."""
        sequence, self.occupants[slot] = self.occupants[slot], None
        if sequence is None:
            return None
        if how is None and sequence.state is State.FINISHED:
            how = Left.ENDED
        elif how is None:
            how = Left.PREEMPTED if sequence.num_preemptions > self.preemptions[slot] else Left.MOVED
        return slot, sequence.number & LOW_32, how


@dataclass(slots=True, eq=False)
class _Name:
    told: SeenSequence
    left_at: int | None = None
    """The row in which it gave up its seat; None while it has one."""


@dataclass(slots=True, eq=False)
class _GoneLane:
    """A lane that is attached no more."""

    told: SeenLane
    last_row: int


@dataclass(slots=True, eq=False)
class IterationRing:
    """`planned`, `applied`, `lost` and `gone` note; `since` tells. Rows are numbered in the order of their ends."""

    newest: int = 0
    """The number of the newest row; an earlier ring's numbers must not come again."""
    _gone_lanes: dict[int, _GoneLane] = field(default_factory=dict)
    """By epoch, as long as rows name them."""
    _rows: deque[Row] = field(default_factory=deque)
    _seats: dict[int, _Seats] = field(default_factory=dict)
    """By epoch."""
    _names: dict[int, _Name] = field(default_factory=dict)
    _departed: deque[tuple[int, int]] = field(default_factory=deque)
    """(row, sequence) of those that left, so that names are forgotten with the rows that show them."""

    @property
    def oldest(self) -> int:
        """The number of the oldest row; one above the newest where there is none."""
        return self.newest - len(self._rows) + 1

    # --- noting ---

    def planned(self, lane: Lane, plan: Plan, now: float) -> None:
        """The lane's next iteration has just been planned."""
        seats, joined = self._seats_of(lane)
        left = [gone for slot in plan.freed.tolist() if (gone := seats.give_up(slot)) is not None]
        for item in plan.new:
            sequence = lane.occupant[item.slot]
            if sequence is not None and sequence is not seats.occupants[item.slot]:
                joined.append(seats.take(item.slot, sequence))
        prefills, numbers = plan.prefills, seats.numbers
        samples = prefills
        if len(prefills):
            samples = prefills[lane.computed[prefills] + plan.prefill_lengths == lane.length[prefills]]
        seats.in_flight = Row(
            epoch=plan.epoch,
            iteration=plan.iteration,
            planned_at=now,
            decodes=plan.decodes,
            decode_sequences=numbers[plan.decodes],
            prefills=prefills,
            prefill_sequences=numbers[prefills],
            prefill_lengths=plan.prefill_lengths,
            samples=samples,
            joined=joined,
            left=left,
        )

    def _seats_of(self, lane: Lane) -> tuple[_Seats, list[SeenSequence]]:
        """A lane's seats; of one that is new here, also who sits there already."""
        seats = self._seats.get(lane.epoch)
        if seats is not None:
            return seats, []
        seats = _Seats(np.zeros(lane.seats, np.uint32), [None] * lane.seats, [0] * lane.seats)
        self._seats[lane.epoch] = seats
        return seats, [seats.take(sequence.slot, sequence) for sequence in lane.resident()]

    def applied(self, lane: Lane, result: Result, now: float) -> None:
        """The result of the iteration in flight has been applied."""
        seats = self._seats.get(lane.epoch)
        if seats is None or seats.in_flight is None:
            return  # it was planned before anybody looked
        row, seats.in_flight = seats.in_flight, None
        row.seconds = now - row.planned_at
        for place in result.finish.nonzero()[0].tolist():
            num_decodes = len(row.decodes)
            slot = int(row.decodes[place] if place < num_decodes else row.samples[place - num_decodes])
            occupant = seats.occupants[slot]
            if occupant is not None and not occupant.aborted:
                left = seats.give_up(slot, Left(int(result.finish[place])))
                assert left is not None
                row.left.append(left)
        self._append(row)

    def lost(self, lane: Lane, reason: str, now: float) -> None:
        """The executor is lost, and its lane about to be detached: the iteration in flight fails with it.

        With nothing in flight the loss is a row of its own, under the number of the lane's last iteration.
        """
        seats, joined = self._seats_of(lane)
        row = seats.in_flight
        if row is None:
            nobody = np.empty(0, np.uint16), np.empty(0, np.uint32)
            lengths = np.empty(0, np.int32)
            row = Row(lane.epoch, lane.iteration, now, *nobody, *nobody, lengths, nobody[0], joined, [])
        row.seconds, row.lost = now - row.planned_at, True
        for slot in range(lane.seats):
            left = seats.give_up(slot, Left.FAILED_OVER)
            if left is not None:
                row.left.append(left)
        self._append(row)
        self.gone(lane, reason)

    def gone(self, lane: Lane, reason: str = "") -> None:
        """The lane is attached no more."""
        self._seats.pop(lane.epoch, None)
        if self._rows:
            told = describe(lane, "lost" if reason else "gone", reason=reason)
            self._gone_lanes[lane.epoch] = _GoneLane(told, self.newest)

    def _append(self, row: Row) -> None:
        self._rows.append(row)
        self.newest += 1
        for told in row.joined:
            self._names[told.sequence] = _Name(told)
        for _, sequence, _ in row.left:
            name = self._names.get(sequence)
            if name is not None:
                name.left_at = self.newest
                self._departed.append((self.newest, sequence))
        if len(self._rows) > CAPACITY:
            self._rows.popleft()
            self._forget_unnamed()

    def _forget_unnamed(self) -> None:
        """Drop the names and lanes that no row shows any more."""
        oldest = self.oldest
        while self._departed and self._departed[0][0] < oldest:
            row, sequence = self._departed.popleft()
            name = self._names.get(sequence)
            if name is not None and name.left_at == row:
                del self._names[sequence]
        for epoch, lane in list(self._gone_lanes.items()):
            if lane.last_row < oldest:
                del self._gone_lanes[epoch]

    # --- telling ---

    @property
    def gone_lanes(self) -> list[SeenLane]:
        """Lanes that rows name, though they are attached no more."""
        return [lane.told for lane in self._gone_lanes.values()]

    def since(self, after: int, limit: int) -> tuple[int, list[Row], list[SeenSequence]]:
        """The number of the first row, at most `limit` rows above `after`, and the sequences new in them.

        To an asker who has missed rows, or knows none, all sequences are new.
        """
        oldest = self.oldest
        missed = after + 1 < oldest or not after or after > self.newest
        first = oldest if missed else after + 1
        rows = list(islice(self._rows, first - oldest, first - oldest + limit))
        if missed:
            return first, rows, [name.told for name in self._names.values()]
        return first, rows, [told for row in rows for told in row.joined]


def seen(sequence: Sequence) -> SeenSequence:
    """What is told of a sequence."""
    return SeenSequence(
        sequence=sequence.number & LOW_32,
        request_id=sequence.request_id,
        index=sequence.index,
        tenant=sequence.tenant,
        prompt_tokens=sequence.prompt_length,
    )


def describe(
    lane: Lane, state: str, *, running: int = 0, referenced: int = 0, cached: int = 0, reason: str = ""
) -> SeenLane:
    """What is told of a lane. The lane itself is not kept: it may hold much."""
    return SeenLane(
        epoch=lane.epoch,
        name=lane.name,
        model=lane.model.name,
        state=state,
        seats=lane.seats,
        running=running,
        token_budget=lane.token_budget,
        block_size=lane.block_size,
        blocks=lane.pool.num_blocks,
        blocks_referenced=referenced,
        blocks_cached=cached,
        reason=reason,
    )
