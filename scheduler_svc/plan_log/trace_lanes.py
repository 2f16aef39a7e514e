"""Turns the steps of a replay into slices, instants and counters."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.wire import Plan
from scheduler_svc.core import Lane, Scheduler, Sequence, State
from scheduler_svc.plan_log.format import Header, Kind
from scheduler_svc.plan_log.player import Step, sequence_name
from scheduler_svc.plan_log.trace_file import TraceFile

SCHEDULER_PID = 1
ITERATIONS_TID, FIRST_SEAT_TID = 1, 2
_COUNTED = (Kind.PLAN, Kind.NO_PLAN, Kind.EXPIRE, Kind.DETACH)


@dataclass(slots=True)
class Decoding:
    """Consecutive iterations in which a sequence decoded."""

    name: str
    begun: float
    until: float
    first: int
    last: int


@dataclass(slots=True)
class Flight:
    """The iteration that is under way."""

    plan: Plan
    planned_at: float
    names: dict[int, str]
    """Of the sequences in it, by slot."""


@dataclass(slots=True)
class Executor:
    """What is under way on one executor."""

    pid: int
    seated: dict[int, Sequence] = field(default_factory=dict)
    decoding: dict[int, Decoding] = field(default_factory=dict)
    flight: Flight | None = None
    named_seats: int = 0


class LaneTracer:
    """One process for each executor (by name, over its epochs), and one for the scheduler."""

    def __init__(self, trace: TraceFile) -> None:
        self._trace = trace
        self._executors: dict[str, Executor] = {}
        self._counters: dict[tuple[int, str], dict[str, int]] = {}
        self._now = 0.0

    def see(self, step: Step, scheduler: Scheduler, header: Header) -> None:
        """Take in one step; the scheduler is in the state after it."""
        if step.kind is Kind.STATE:
            self._begin_run(step.now, scheduler, header)
        self._now = step.now
        if step.lane is not None and not step.raised:
            self._see_lane(step, step.lane)
        if step.kind in _COUNTED:
            waiting = scheduler.waiting_by_reason()
            self._count(SCHEDULER_PID, "waiting", {reason.value: n for reason, n in waiting.items() if n})

    def close(self) -> None:
        """The log ends: so does all that is under way."""
        for executor in self._executors.values():
            self._end_flight(executor, self._now, "under way")
            self._end_all(executor)

    def _begin_run(self, now: float, scheduler: Scheduler, header: Header) -> None:
        self.close()
        self._trace.set_clock(header)
        self._now = now
        if not self._counters:
            self._trace.name_process(SCHEDULER_PID, "scheduler", now)
        for executor in self._executors.values():
            executor.seated.clear()
        for lane in scheduler.lanes.values():
            executor = self._executor(lane)
            executor.seated = {sequence.slot: sequence for sequence in lane.running()}

    def _executor(self, lane: Lane) -> Executor:
        executor = self._executors.get(lane.name)
        if executor is None:
            executor = self._executors[lane.name] = Executor(SCHEDULER_PID + 1 + len(self._executors))
            self._trace.name_process(executor.pid, f"executor {lane.name}", self._now)
            self._trace.name_thread(executor.pid, ITERATIONS_TID, "iterations", self._now)
        return executor

    def _see_lane(self, step: Step, lane: Lane) -> None:
        executor = self._executor(lane)
        match step.kind:
            case Kind.ATTACH:
                self._trace.instant("attached", executor.pid, ITERATIONS_TID, step.now, scope="p", epoch=lane.epoch)
                self._name_seats(executor, lane)
            case Kind.DETACH:
                word = "failover" if step.reason else "moved"
                self._end_flight(executor, step.now, "lost")
                self._vacate(executor, lane, step.now, word)
                reason = step.reason or "drained"
                self._trace.instant("detached", executor.pid, ITERATIONS_TID, step.now, scope="p", reason=reason)
                self._count_lane(executor, lane, 0, 0)
            case Kind.PLAN:
                self._vacate(executor, lane, step.now, "moved" if lane.draining else "preempted")
                self._seat(executor, lane, step)
            case Kind.APPLY:
                self._end_iteration(executor, step)
                self._vacate(executor, lane, step.now, "moved")
            case _:
                self._vacate(executor, lane, step.now, "moved")

    def _name_seats(self, executor: Executor, lane: Lane) -> None:
        for slot in range(executor.named_seats, lane.seats):
            self._trace.name_thread(executor.pid, FIRST_SEAT_TID + slot, f"seat {slot}", self._now)
        executor.named_seats = max(executor.named_seats, lane.seats)

    # --- who sits where ---

    def _vacate(self, executor: Executor, lane: Lane, now: float, word: str) -> None:
        """Note who has left a seat; `word` is for those that wait again."""
        for slot, sequence in list(executor.seated.items()):
            if lane.occupant[slot] is sequence:
                continue
            del executor.seated[slot]
            self._end_decoding(executor, slot)
            if sequence.state is not State.FINISHED:
                name = f"{sequence.request_id}/{sequence.stream}"
                self._trace.instant(word, executor.pid, FIRST_SEAT_TID + slot, now, sequence=name)

    def _seat(self, executor: Executor, lane: Lane, step: Step) -> None:
        plan = step.plan
        assert plan is not None
        self._name_seats(executor, lane)
        for item in plan.new:
            sequence = lane.occupant[item.slot]
            assert sequence is not None
            executor.seated[item.slot] = sequence
            name, tid = sequence_name(lane, item.slot), FIRST_SEAT_TID + item.slot
            tokens, cached = len(item.tokens), item.computed
            self._trace.instant(
                "admitted", executor.pid, tid, step.now, sequence=name, tokens=tokens, cached_tokens=cached
            )
        rows = [*plan.decodes.tolist(), *plan.prefills.tolist()]
        executor.flight = Flight(plan, step.now, {slot: sequence_name(lane, slot) for slot in rows})
        self._count_lane(executor, lane, len(plan.decodes), int(plan.prefill_lengths.sum()))

    # --- iterations ---

    def _end_iteration(self, executor: Executor, step: Step) -> None:
        flight = executor.flight
        if flight is None or step.result is None:
            return
        for slot in flight.plan.decodes.tolist():
            decoding = executor.decoding.get(slot)
            if decoding is not None and decoding.last == flight.plan.iteration - 1:
                decoding.until, decoding.last = step.now, flight.plan.iteration
                continue
            self._end_decoding(executor, slot)
            iteration = flight.plan.iteration
            executor.decoding[slot] = Decoding(flight.names[slot], flight.planned_at, step.now, iteration, iteration)
        for slot, tokens in zip(flight.plan.prefills.tolist(), flight.plan.prefill_lengths.tolist(), strict=True):
            self._end_decoding(executor, slot)
            self._trace.slice(
                f"{flight.names[slot]} prefill", executor.pid, FIRST_SEAT_TID + slot, flight.planned_at, step.now,
                tokens=tokens, iteration=flight.plan.iteration,
            )  # fmt: skip
        self._end_flight(executor, step.now, "", busy_us=step.result.busy_us, device_us=step.result.device_us)

    def _end_flight(self, executor: Executor, now: float, outcome: str, **args: object) -> None:
        """The slice of an iteration; an outcome that is not empty tells why it has no result."""
        flight, executor.flight = executor.flight, None
        if flight is None:
            return
        plan = flight.plan
        name = f"iteration {plan.iteration}" + (f" ({outcome})" if outcome else "")
        self._trace.slice(
            name, executor.pid, ITERATIONS_TID, flight.planned_at, now,
            decodes=len(plan.decodes), prefill_tokens=int(plan.prefill_lengths.sum()), **args,
        )  # fmt: skip

    def _end_decoding(self, executor: Executor, slot: int) -> None:
        run = executor.decoding.pop(slot, None)
        if run is not None:
            self._trace.slice(
                run.name, executor.pid, FIRST_SEAT_TID + slot, run.begun, run.until,
                iterations=run.last - run.first + 1, first=run.first, last=run.last,
            )  # fmt: skip

    def _end_all(self, executor: Executor) -> None:
        for slot in list(executor.decoding):
            self._end_decoding(executor, slot)

    # --- counters ---

    def _count_lane(self, executor: Executor, lane: Lane, decodes: int, prefill_tokens: int) -> None:
        self._count(executor.pid, "tokens in the iteration", {"decode": decodes, "prefill": prefill_tokens})
        self._count(executor.pid, "running", {"running": lane.num_running})
        self._count(executor.pid, "KV blocks used", {"used": lane.pool.num_referenced})

    def _count(self, pid: int, name: str, values: dict[str, int]) -> None:
        """Write a counter where it has changed; values that were there before and are not now are zero."""
        before = self._counters.get((pid, name), {})
        values = dict.fromkeys(before, 0) | values
        if values != before:
            self._counters[pid, name] = values
            self._trace.counter(name, pid, self._now, values)
