"""Plays a plan log: runs the core again over every frame, and sees that it decides as it did."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from common.wire import Ended, EndReason, Message, Plan, Result, Submit, SubmitCall, WireError, decode, encode
from scheduler_svc.core import Lane, Scheduler
from scheduler_svc.plan_log.differences import Difference, compare_plans
from scheduler_svc.plan_log.format import VERBS, FormatError, Header, Kind
from scheduler_svc.plan_log.messages import decode_as, unpack_card, unpack_limits, unpack_point, unpack_result
from scheduler_svc.plan_log.segments import Frame, Segment, frames_of, segments
from scheduler_svc.plan_log.snapshot import compare_states, pack_state, unpack_state

PLAIN_ON_A_LANE = {
    Kind.LEAVE: Scheduler.leave,
    Kind.PAUSE: Scheduler.pause,
    Kind.RESUME: Scheduler.resume,
    Kind.VACATE: Scheduler.vacate,
}
"""Verbs that are given a lane and the time."""
ON_A_LANE = (Kind.DETACH, Kind.PLAN, Kind.NO_PLAN, Kind.APPLY, Kind.FETCHED, *PLAIN_ON_A_LANE)


def sequence_name(lane: Lane, slot: int) -> str:
    """The sequence in a slot, as `request/stream`."""
    sequence = lane.occupant[slot] if slot < lane.seats else None
    return f"{sequence.request_id}/{sequence.stream}" if sequence is not None else "?"


def _call(data: bytes) -> Submit | SubmitCall:
    call = decode(data)
    if not isinstance(call, Submit | SubmitCall):
        raise FormatError("what was submitted is no request")
    return call


class Step(NamedTuple):
    """A verb that was played, or (kind `STATE`) the beginning of another run; the scheduler is in the state after."""

    kind: Kind
    now: float
    lane: Lane | None = None
    """Of the verbs that concern one."""
    plan: Plan | None = None
    result: Result | None = None
    requests: tuple[Submit, ...] = ()
    """Of submit and refuse: those of the call."""
    owner: int = 0
    """The frontend of submit, refuse and abort."""
    stopped: bool = False
    """Of abort: whether stop strings ended the streams."""
    reason: str = ""
    """Of detach: why the executor was lost; empty where it was let go."""
    messages: tuple[tuple[int, Message], ...] = ()
    """What the frontends were told, see `Scheduler.outbox`."""
    raised: str = ""
    """The exception in which the verb ended, as it did when the log was written."""


class _Frames:
    """Frames of some segments, of which the next one can be looked at."""

    def __init__(self, played: list[Segment]) -> None:
        self._rest = frames_of(played)
        self._ahead: Frame | None = None

    def __iter__(self) -> Iterator[Frame]:
        while (frame := self.peek()) is not None:
            self._ahead = None
            yield frame

    def peek(self) -> Frame | None:
        if self._ahead is None:
            self._ahead = next(self._rest, None)
        return self._ahead


class Player:
    """One pass over a log. `scheduler` and `header` change as `steps` goes on."""

    def __init__(self, path: Path) -> None:
        """Raises `FormatError` where there is no log."""
        self.segments = segments(path)
        self.num_iterations = self.num_requests = 0
        self.scheduler: Scheduler
        self.header: Header
        self._following: tuple[bytes, int] | None = None
        """(run, part) of the segment that would go on from here."""
        self._num_cut = 0
        """Segments whose end is missing, as of the last one that began."""
        self._cards: dict[int, list[Any]] = {}
        self._frames = _Frames(self.segments)

    def steps(self) -> Iterator[Step]:
        """Play the log. Raises `Difference` at the first decision that is not the one in the log, `FormatError` for a
        file that cannot be read or was written by another version."""
        try:
            yield from self._steps()
        except WireError as error:
            raise FormatError(f"a frame that cannot be read ({error})") from error

    def _steps(self) -> Iterator[Step]:
        for frame in self._frames:
            if frame.kind is Kind.HEADER:
                (self.header,) = frame.arguments
                self._cards.clear()
            elif frame.kind is Kind.STATE:
                if self._take_state(frame.arguments[0]):
                    yield Step(Kind.STATE, frame.now)
            elif frame.kind is Kind.CARD:
                number, packed = frame.arguments
                self._cards[number] = packed
            elif frame.kind in VERBS:
                yield self._play(frame)
            else:
                raise FormatError(f"an unexpected {frame.kind.name} frame")

    def _take_state(self, state: bytes | None) -> bool:
        """Begin from a state, or see that it is the one reached so far. Returns whether it began."""
        header = self.header
        follows = state is not None and self._following == (header.run, header.part)
        cut = [segment.path for segment in self.segments if segment.num_cut_bytes]
        num_cut_before, self._num_cut = self._num_cut, len(cut)
        if follows and len(cut) > num_cut_before:
            raise FormatError(f"{cut[-1]}: its end is missing, though the log goes on")
        self._following = header.run, header.part + 1
        if state is None:
            self.scheduler = Scheduler(header.config, first_epoch=header.first_epoch)
            return True
        try:
            if not follows:
                self.scheduler = unpack_state(header.config, state)
                return True
            found = compare_states(state, pack_state(self.scheduler))
        except (ValueError, TypeError, LookupError) as error:
            raise FormatError(f"a state that cannot be read ({type(error).__name__}: {error})") from error
        if found:
            raise Difference(f"the state where part {header.part} of the log begins: {found}")
        return False

    def _play(self, frame: Frame) -> Step:
        """Run the verb of a frame, and compare how it went."""
        step = Step(frame.kind, frame.now)
        raised = ""
        try:
            step = self._perform(frame)
        except (FormatError, WireError, Difference):
            raise
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"
        self._compare_raised(frame, raised)
        self._compare_orders(frame)
        messages, self.scheduler.outbox = tuple(self.scheduler.outbox), []
        return step._replace(messages=messages, raised=raised)

    def _compare_raised(self, frame: Frame, raised: str) -> None:
        following = self._frames.peek()
        recorded = ""
        if following is not None and following.kind is Kind.RAISED:
            recorded = ": ".join(following.arguments)
            next(iter(self._frames))
        if raised.split(":")[0] != recorded.split(":")[0]:
            there, here = recorded or "it went well", raised or "it goes well"
            raise Difference(
                f"{frame.kind.name.lower()} at {frame.now:.6f} s\n  in the log: {there}\n  replayed: {here}"
            )

    def _compare_orders(self, frame: Frame) -> None:
        """What executors were told beside their plans."""
        orders, self.scheduler.handovers.orders = self.scheduler.handovers.orders, []
        following = self._frames.peek()
        recorded: list[bytes] = []
        if following is not None and following.kind is Kind.ORDERS:
            recorded = following.arguments
            next(iter(self._frames))
        elif following is None:
            return  # the log may end before them
        if [encode(order) for order in orders] != recorded:
            there = ", ".join(str(decode(data)) for data in recorded) or "no orders"
            here = ", ".join(str(order) for order in orders) or "no orders"
            raise Difference(
                f"{frame.kind.name.lower()} at {frame.now:.6f} s\n  in the log: {there}\n  replayed: {here}"
            )

    def _perform(self, frame: Frame) -> Step:
        scheduler, now = self.scheduler, frame.now
        step = Step(frame.kind, now)
        match frame.kind, frame.arguments:
            case Kind.SUBMIT, [owner, data]:
                call = _call(data)
                scheduler.submit(owner, call, now)
                self.num_requests += len(call.requests)
                return step._replace(owner=owner, requests=call.requests)
            case Kind.REFUSE, [owner, data, answer]:
                call = _call(data)
                scheduler.refuse(owner, call, decode_as(Ended, answer))
                return step._replace(owner=owner, requests=call.requests)
            case Kind.ABORT, [owner, streams, stopped]:
                scheduler.abort(owner, streams, now, stopped=stopped)
                return step._replace(owner=owner, stopped=stopped)
            case Kind.ABORT_OWNER, [owner]:
                scheduler.abort_owner(owner, now)
                return step._replace(owner=owner)
            case Kind.END_ALL, [reason, message]:
                scheduler.end_all(EndReason(reason), message, now)
            case Kind.EXPIRE, []:
                scheduler.expire(now)
            case Kind.ATTACH, [name, number, limits, point, spare, paused]:
                card = unpack_card(self._cards[number])
                fields = unpack_limits(limits), now, unpack_point(point)
                lane = scheduler.attach(name, card, *fields, spare=spare, paused=paused)
                return step._replace(lane=lane)
            case kind, [number, *rest] if kind in ON_A_LANE:
                return self._perform_on_lane(step, self._lane(number), rest)
            case _:
                raise FormatError(f"a {frame.kind.name} frame with unexpected arguments")
        return step

    def _lane(self, number: int) -> Lane:
        lane = self.scheduler.lanes.get(self.header.first_epoch + number)
        if lane is None:
            raise FormatError("a frame names a lane that is not there")
        return lane

    def _perform_on_lane(self, step: Step, lane: Lane, rest: list[Any]) -> Step:
        scheduler, now = self.scheduler, step.now
        match step.kind, rest:
            case Kind.DETACH, [guilty, reason]:
                scheduler.detach(lane, now, guilty=guilty, reason=reason)
                return step._replace(lane=lane, reason=reason)
            case kind, [] if kind in PLAIN_ON_A_LANE:
                PLAIN_ON_A_LANE[kind](scheduler, lane, now)
            case Kind.FETCHED, [ticket, done, busy_s]:
                scheduler.fetched(lane, ticket, now, done=done, busy_s=busy_s)
            case Kind.APPLY, packed:
                result = unpack_result(lane.epoch, packed)
                scheduler.apply(lane, result, now)
                return step._replace(lane=lane, result=result)
            case Kind.PLAN, [data]:
                return step._replace(lane=lane, plan=self._plan(lane, data, now))
            case Kind.NO_PLAN, []:
                return step._replace(lane=lane, plan=self._plan(lane, None, now))
        return step._replace(lane=lane)

    def _plan(self, lane: Lane, data: bytes | None, now: float) -> Plan | None:
        plan = self.scheduler.plan(lane, now)
        if plan is None and data is None:
            return None
        if plan is None or data is None or encode(plan) != data:
            recorded = decode_as(Plan, data) if data is not None else None
            where = f"executor {lane.name}, iteration {(plan or recorded).iteration}, at {now:.6f} s"  # type: ignore[union-attr]
            raise Difference(where + "\n" + compare_plans(recorded, plan, lambda slot: sequence_name(lane, slot)))
        self.num_iterations += 1
        return plan
