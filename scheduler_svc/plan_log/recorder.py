"""A scheduler that writes down all that it is told, and every plan that it makes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from hashlib import blake2b
from types import TracebackType
from typing import Any

from common.wire import Ended, EndReason, Limits, ModelCard, Plan, Result, Submit, SubmitCall, TransferPoint, encode
from scheduler_svc.core import Lane, Scheduler, SchedulerConfig
from scheduler_svc.core.handover import Handovers
from scheduler_svc.plan_log.format import Header, Kind, pack_frame
from scheduler_svc.plan_log.messages import pack_card, pack_limits, pack_point, pack_result
from scheduler_svc.plan_log.snapshot import pack_state
from scheduler_svc.plan_log.writer import PlanLog

OVERFULL = 1.25
"""Fullness of a segment at which another one begins at any moment."""


class _Verb:
    """Tells the verb that was called from outside from those that it calls; notes what it raises, and its orders."""

    def __init__(self, log: PlanLog, handovers: Handovers) -> None:
        self._log, self._handovers = log, handovers
        self.depth = 0
        self._num_orders = 0
        """Orders that were there before the verb."""

    def __enter__(self) -> None:
        if not self.depth:
            self._num_orders = len(self._handovers.orders)
        self.depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.depth -= 1
        if self.depth:
            return
        if kind is not None:
            self._log.write(None, Kind.RAISED, kind.__name__, str(error))
        orders = self._handovers.orders[self._num_orders :]
        if orders:
            self._log.write(None, Kind.ORDERS, *(encode(order) for order in orders))


class RecordedScheduler(Scheduler):
    """Each verb that changes the state from outside writes one frame; verbs that it calls in turn write none.

    The core is pure, so its state at any moment follows from the frames up to there.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        log: PlanLog,
        *,
        first_epoch: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` is the one whose time the verbs are given."""
        super().__init__(config, first_epoch=first_epoch)
        self._clock = clock
        self._log, self._first_epoch = log, first_epoch
        self._verb = _Verb(log, self.handovers)
        self._cards: dict[bytes, int] = {}
        """Numbers of the model cards that the segment holds, by their digest."""
        self._busy: set[int] = set()
        """Lanes whose last plan was one."""
        self._encoded: tuple[Plan, bytes] | None = None
        self._begin(None)

    def encoded(self, plan: Plan) -> bytes:
        """The encoding of a plan; of the newest one, which the log holds, it is not made twice."""
        if self._encoded is not None and self._encoded[0] is plan:
            return self._encoded[1]
        return encode(plan)

    def begin_segment(self) -> None:
        """Begin a new segment with the present state, from which it can be played by itself."""
        self._begin(pack_state(self))

    def _turn_over(self, kind: Kind) -> None:
        """Before a verb: begin a new segment when this one is full. What goes wrong here ends the log alone.

        To write the state takes a while, so a moment in which all executors are at work is waited for.
        """
        fullness = self._log.fullness
        if fullness < 1 or (fullness < OVERFULL and not (kind is Kind.EXPIRE and self._all_at_work())):
            return
        try:
            self.begin_segment()
        except Exception as error:
            self._log.fail(f"{type(error).__name__}: {error}")

    def _all_at_work(self) -> bool:
        return all(lane.in_flight is not None for lane in self.lanes.values())

    def _begin(self, state: bytes | None) -> None:
        log = self._log
        header = Header(self.config, self._first_epoch, log.run, log.part, time.time(), self._clock())
        self._cards.clear()
        log.begin_segment(header, state)

    def _frame(self, kind: Kind, *arguments: Any, now: float | None = None) -> _Verb:
        """Write the frame of a verb, unless another verb calls it; the verb itself belongs in the `with` block."""
        if not self._verb.depth:
            self._turn_over(kind)
            self._log.write(now, kind, *arguments)
        return self._verb

    def _number(self, lane: Lane) -> int:
        return lane.epoch - self._first_epoch

    # --- verbs ---

    def submit(self, owner: int, call: Submit | SubmitCall, now: float) -> None:
        with self._frame(Kind.SUBMIT, owner, encode(call), now=now):
            super().submit(owner, call, now)

    def refuse(self, owner: int, call: Submit | SubmitCall, answer: Ended) -> None:
        with self._frame(Kind.REFUSE, owner, encode(call), encode(answer)):
            super().refuse(owner, call, answer)

    def abort(self, owner: int, streams: Iterable[int], now: float, *, stopped: bool = False) -> None:
        streams = list(streams)
        with self._frame(Kind.ABORT, owner, streams, stopped, now=now):
            super().abort(owner, streams, now, stopped=stopped)

    def abort_owner(self, owner: int, now: float) -> None:
        with self._frame(Kind.ABORT_OWNER, owner, now=now):
            super().abort_owner(owner, now)

    def end_all(self, reason: EndReason, message: str, now: float) -> None:
        with self._frame(Kind.END_ALL, int(reason), message, now=now):
            super().end_all(reason, message, now)

    def attach(
        self,
        name: str,
        model: ModelCard,
        limits: Limits,
        now: float,
        transfer: TransferPoint | None = None,
        *,
        spare: bool = False,
        paused: bool = False,
    ) -> Lane:
        self._turn_over(Kind.ATTACH)  # now, lest the card stay in the segment before
        fields = self._card(model), pack_limits(limits), pack_point(transfer), spare, paused
        with self._frame(Kind.ATTACH, name, *fields, now=now):
            return super().attach(name, model, limits, now, transfer, spare=spare, paused=paused)

    def _card(self, model: ModelCard) -> int:
        """The number of a card in this segment; executors that are refused bring theirs again and again."""
        packed = pack_card(model)
        key = blake2b(pack_frame(packed), digest_size=16).digest()
        if key not in self._cards:
            self._cards[key] = len(self._cards)
            self._log.write(None, Kind.CARD, self._cards[key], packed)
        return self._cards[key]

    def detach(self, lane: Lane, now: float, *, guilty: Iterable[int] = (), reason: str = "") -> None:
        guilty = list(guilty)
        with self._frame(Kind.DETACH, self._number(lane), guilty, reason, now=now):
            super().detach(lane, now, guilty=guilty, reason=reason)

    def leave(self, lane: Lane, now: float) -> None:
        with self._frame(Kind.LEAVE, self._number(lane), now=now):
            super().leave(lane, now)

    def pause(self, lane: Lane, now: float) -> None:
        with self._frame(Kind.PAUSE, self._number(lane), now=now):
            super().pause(lane, now)

    def resume(self, lane: Lane, now: float) -> None:
        with self._frame(Kind.RESUME, self._number(lane), now=now):
            super().resume(lane, now)

    def vacate(self, lane: Lane, now: float) -> None:
        with self._frame(Kind.VACATE, self._number(lane), now=now):
            super().vacate(lane, now)

    def fetched(self, lane: Lane, ticket: int, now: float, *, done: bool, busy_s: float) -> None:
        with self._frame(Kind.FETCHED, self._number(lane), ticket, done, busy_s, now=now):
            super().fetched(lane, ticket, now, done=done, busy_s=busy_s)

    def expire(self, now: float) -> float | None:
        with self._frame(Kind.EXPIRE, now=now):
            return super().expire(now)

    def plan(self, lane: Lane, now: float) -> Plan | None:
        number = self._number(lane)
        frame: tuple[Any, ...] = (Kind.NO_PLAN, number)
        self._turn_over(Kind.PLAN)
        with self._verb:
            try:
                plan = super().plan(lane, now)
                if plan is not None:
                    data = encode(plan)
                    self._encoded = plan, data
                    frame = Kind.PLAN, number, data
            finally:
                self._log.write(now, *frame)
        self._note_idle(number, plan is None)
        return plan

    def _note_idle(self, number: int, idle: bool) -> None:
        """A lane that has come to rest is a good moment for the disk, and somebody may want to look."""
        if not idle:
            self._busy.add(number)
        elif number in self._busy:
            self._busy.remove(number)
            self._log.flush()

    def apply(self, lane: Lane, result: Result, now: float) -> None:
        with self._frame(Kind.APPLY, self._number(lane), *pack_result(result, lane.epoch), now=now):
            super().apply(lane, result, now)
