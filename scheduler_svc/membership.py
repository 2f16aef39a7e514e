"""Which executors are attached: Hello, epochs, signs of life, iteration deadlines, and the end of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from common.logs import Seldom
from common.wire import (
    PROTOCOL_VERSION,
    Alive,
    Drain,
    Fault,
    Fetched,
    Hello,
    Leaving,
    Plan,
    Refused,
    Reset,
    Result,
    Welcome,
    WireError,
    decode,
    encode,
    hello_protocol,
)
from scheduler_svc.core import AttachError, Lane, LaneError, Scheduler
from scheduler_svc.core.config import Preemption
from scheduler_svc.core.pacing import Deadline
from scheduler_svc.pauses import Pauses
from scheduler_svc.tickets import Tickets
from scheduler_svc.watching.ring import IterationRing

log = structlog.get_logger()

Send = Callable[[bytes, bytes], bool]
"""(peer, message) -> whether the peer was there to take it."""

REFUSAL_LOG_S = 30.0
MAX_LOSSES = 256
"""Names of executors whose last loss is remembered."""
PROBE_S = 1.0
"""ZeroMQ tells of a broken connection a little before it drops the route to it; probe so long for whose it was."""


@dataclass(slots=True, eq=False)
class Executor:
    """One attached executor."""

    peer: bytes
    name: str
    incarnation: bytes
    lane: Lane
    alive_at: float
    device: str = ""
    attached_at: float = 0.0
    drain_by: float | None = None
    """When its lane gives back what no other has had room for."""
    is_at_rest: bool = False
    """It was found paused, with nothing left to do."""
    deadline: float | None = None
    """When the iteration in flight must be back."""
    allowed: Deadline | None = None
    """How long the newest iteration may take."""

    @property
    def state(self) -> str:
        """For operators: `attached`, `spare` (and standing by), `draining`, `paused`, or `leaving`."""
        lane = self.lane
        if lane.admits:
            return "attached"
        if lane.stands_by:
            return "spare"
        if not lane.stays:
            return "leaving"
        return "paused" if lane.is_vacant else "draining"


class Membership:
    """Drives every lane: sends its plans, takes its results, and ends its epoch when the executor fails."""

    def __init__(
        self,
        scheduler: Scheduler,
        send: Send,
        *,
        heartbeat_ms: int,
        heartbeat_timeout_s: float,
        iteration_timeout_s: float,
        iteration_floor_s: float = 10.0,
        encode_plan: Callable[[Plan], bytes] = encode,
    ) -> None:
        self._scheduler, self._send, self._encode_plan = scheduler, send, encode_plan
        self._heartbeat_ms, self._heartbeat_timeout_s = heartbeat_ms, heartbeat_timeout_s
        self._iteration_timeout_s, self._iteration_floor_s = iteration_timeout_s, iteration_floor_s
        self._by_peer: dict[bytes, Executor] = {}
        self._by_epoch: dict[int, Executor] = {}
        self._tickets = Tickets(answer_within_s=iteration_timeout_s)
        self._probe_until = 0.0
        self._quiet_until: dict[str, float] = {}
        """Refusals of the same executor are not logged again before."""
        self.models_changed = False
        """Set when a lane came or went; the loop tells the frontends and clears it."""
        self.pauses = Pauses()
        self.losses: dict[str, tuple[str, float]] = {}
        """Why and when an executor of this name was lost last; the newest loss comes last."""
        self._junk_seen, self._late, self._foreign = Seldom(), Seldom(), Seldom()
        self.num_overdue: Counter[str] = Counter()
        """Executors lost over a late iteration, by what its deadline followed from."""
        self.last_plan_bytes = 0
        self.ring: IterationRing | None = None
        """Where iterations are noted while somebody looks."""

    @property
    def executors(self) -> list[Executor]:
        """Those attached, in the order of their coming."""
        return list(self._by_epoch.values())

    @property
    def num_junk(self) -> int:
        """Messages on the executors' socket that were none, so far."""
        return self._junk_seen.count

    # --- messages ---

    def receive(self, peer: bytes, data: bytes, now: float) -> None:
        """Take one message from the executors' socket. Junk is counted and dropped."""
        try:
            message = decode(data)
        except WireError as error:
            protocol = hello_protocol(data)
            if protocol is None or protocol == PROTOCOL_VERSION:
                self._junk(peer, str(error), now)
            else:
                self._refuse_protocol(peer, protocol)
            return
        executor = self._by_peer.get(peer)
        match message:
            case Alive():
                self._alive(peer, message, now)
            case Hello() if message.protocol != PROTOCOL_VERSION:
                self._refuse_protocol(peer, message.protocol)
            case Hello():
                self._hello(peer, message, now)
            case Result() | Fault() | Leaving() | Fetched() if executor is None or executor.lane.epoch != message.epoch:
                if self._late.happens():
                    kind = type(message).__name__
                    log.info("late message of an ended epoch dropped", kind=kind, epoch=message.epoch)
            case Result() if executor is not None:
                self._result(executor, message, now)
            case Fault() if executor is not None:
                text = f"{message.reason}: {message.message}"
                self.lose(executor, now, f"fault: {text}", guilty=message.slots.tolist())
            case Leaving() if executor is not None:
                log.info("executor is leaving", executor=executor.name, reason=message.reason)
                self._scheduler.leave(executor.lane, now)
                self.models_changed = True
            case Fetched() if executor is not None:
                self._fetched(executor, message, now)
            case _:
                self._junk(peer, f"unexpected {type(message).__name__}", now)

    def _refuse_protocol(self, peer: bytes, protocol: int) -> None:
        """Answer the Hello of an executor of another version, also one whose fields this version cannot read."""
        text = f"this scheduler speaks protocol {PROTOCOL_VERSION}, the executor {protocol}"
        if self._foreign.happens():
            log.warning("executor refused", reason=text, count=self._foreign.count)
        self._send(peer, encode(Refused(text, retry=False)))

    def _junk(self, peer: bytes, text: str, now: float) -> None:
        if self._junk_seen.happens():
            log.warning("junk on the executors' socket dropped", error=text, count=self.num_junk)
        executor = self._by_peer.get(peer)
        if executor is not None:
            self.lose(executor, now, f"sent junk: {text}")

    def _alive(self, peer: bytes, message: Alive, now: float) -> None:
        executor = self._by_epoch.get(message.epoch)
        if executor is not None:
            executor.alive_at = now
        # Epoch 0 tells a process that its epoch is over here.
        self._send(peer, encode(message if executor is not None or not message.epoch else Alive(0)))

    def _hello(self, peer: bytes, hello: Hello, now: float) -> None:
        known = self._by_peer.get(peer)
        if known is not None:
            self._send(peer, encode(Welcome(known.lane.epoch, self._heartbeat_ms)))
            return
        refusal = self._name_taken(hello, now)
        if refusal is None:
            try:
                lane = self._scheduler.attach(
                    hello.name,
                    hello.model,
                    hello.limits,
                    now,
                    hello.transfer,
                    spare=hello.spare,
                    paused=hello.name in self.pauses,
                )
            except AttachError as error:
                refusal = Refused(str(error), retry=True)
        if refusal is not None:
            self._log_refusal(hello.name, refusal.reason, now)
            self._send(peer, encode(refusal))
            return
        self._quiet_until.clear()
        executor = Executor(peer, hello.name, hello.incarnation, lane, now, hello.device, now)
        self._by_peer[peer] = self._by_epoch[lane.epoch] = executor
        self.models_changed = True
        self._send(peer, encode(Welcome(lane.epoch, self._heartbeat_ms)))
        log.info(
            "executor attached",
            executor=hello.name,
            epoch=lane.epoch,
            model=hello.model.name,
            device=hello.device,
            blocks=hello.limits.num_blocks,
            seats=lane.seats,
            state=executor.state,
        )
        if self._scheduler.config.preemption is Preemption.SWAP and not hello.limits.num_host_blocks:
            log.warning("nothing can be swapped: the executor has no host blocks", executor=hello.name)

    def _log_refusal(self, name: str, reason: str, now: float) -> None:
        """A refused executor asks again each second; that is logged now and then."""
        if now < self._quiet_until.get(name, now):
            return
        if len(self._quiet_until) >= 256:
            self._quiet_until.clear()
        self._quiet_until[name] = now + REFUSAL_LOG_S
        log.warning("executor refused", executor=name, reason=reason)

    def _name_taken(self, hello: Hello, now: float) -> Refused | None:
        for executor in list(self._by_peer.values()):
            if executor.name != hello.name:
                continue
            if executor.incarnation == hello.incarnation:
                self.lose(executor, now, "dialled anew")
            else:
                return Refused(f"an executor named {hello.name!r} is attached already", retry=True)
        return None

    def _result(self, executor: Executor, result: Result, now: float) -> None:
        lane = executor.lane
        flight = lane.in_flight
        if result.iteration <= lane.iteration and (flight is None or result.iteration < flight.iteration):
            log.info("repeated result dropped", executor=executor.name, iteration=result.iteration)
            return
        try:
            self._scheduler.apply(lane, result, now)
        except LaneError as error:
            self.lose(executor, now, f"impossible result: {error}")
            return
        executor.deadline = None
        if self.ring is not None:
            self.ring.applied(lane, result, now)

    def _fetched(self, executor: Executor, answer: Fetched, now: float) -> None:
        if not self._tickets.close(answer):
            log.info("answer to no hand-over dropped", executor=executor.name, ticket=answer.ticket)
            return
        if not answer.done:
            log.info("hand-over failed", executor=executor.name, ticket=answer.ticket, reason=answer.reason)
        busy_s = answer.busy_us / 1e6
        self._scheduler.fetched(executor.lane, answer.ticket, now, done=answer.done, busy_s=busy_s)

    # --- iterations ---

    def plan_idle_lanes(self, now: float) -> None:
        """Send a plan to every lane that is idle and has work; those that drain first: others take what they leave."""
        for executor in sorted(self._by_peer.values(), key=lambda executor: not executor.lane.draining):
            lane = executor.lane
            if lane.in_flight is not None:
                continue
            plan = self._scheduler.plan(lane, now)
            if plan is None:
                if lane.draining and lane.is_vacant:
                    self._end_drain(executor, now)
                continue
            if self.ring is not None:
                self.ring.planned(lane, plan, now)
            data = self._encode_plan(plan)
            self.last_plan_bytes = len(data)
            assert lane.in_flight is not None
            executor.allowed = lane.pace.deadline(
                lane.in_flight.num_tokens, self._iteration_floor_s, self._iteration_timeout_s
            )
            executor.deadline = now + executor.allowed.seconds
            if not self._send(executor.peer, data):
                self.lose(executor, now, "connection lost")
        self._send_orders(now)

    def _send_orders(self, now: float) -> None:
        """What executors must be told of hand-overs."""
        handovers = self._scheduler.handovers
        while handovers.orders:
            orders, handovers.orders = handovers.orders, []
            for order in orders:
                executor = self._by_epoch.get(order.epoch)
                if executor is not None and not self._send(executor.peer, encode(self._tickets.open(order, now))):
                    self.lose(executor, now, "connection lost")

    def _end_drain(self, executor: Executor, now: float) -> None:
        """A lane is empty: let its executor go, or note that it is paused."""
        executor.drain_by = None
        if executor.lane.stays:
            if not executor.is_at_rest:
                log.info("executor paused", executor=executor.name)
            executor.is_at_rest = True
            return
        log.info("executor drained", executor=executor.name)
        self._send(executor.peer, encode(Drain(executor.lane.epoch)))
        self._forget(executor)
        if self.ring is not None:
            self.ring.gone(executor.lane)
        self._scheduler.detach(executor.lane, now)

    # --- failure ---

    def connection_broken(self, now: float) -> None:
        """Some connection to the executors' socket broke: find out whose at the next wake-ups."""
        self._probe_until = now + PROBE_S

    def excuse(self, stalled_s: float, now: float) -> None:
        """This process stood still so long, and perhaps the whole machine: no executor was silent or late meanwhile."""
        for executor in self._by_peer.values():
            executor.alive_at = min(now, executor.alive_at + stalled_s)
            if executor.deadline is not None:
                executor.deadline += stalled_s
        self._tickets.excuse(stalled_s)

    def check(self, now: float) -> float | None:
        """Lose executors that are gone, silent or late. Returns seconds until the next check is due, or None."""
        probing = now < self._probe_until
        due = [0.01] if probing else []
        for executor in list(self._by_peer.values()):
            if probing and not self._send(executor.peer, encode(Alive(executor.lane.epoch))):
                self.lose(executor, now, "connection lost")
            elif now - executor.alive_at > self._heartbeat_timeout_s:
                self.lose(executor, now, f"no sign of life for {now - executor.alive_at:.1f} s")
            elif executor.deadline is not None and executor.allowed is not None and now > executor.deadline:
                seconds, source = executor.allowed
                self.num_overdue[source] += 1
                self.lose(executor, now, f"no result within {seconds:.3g} s (deadline: {source})")
            elif self._tickets.is_overdue(executor.lane.epoch, now):
                self.lose(executor, now, "no answer about a hand-over")
            else:
                if executor.drain_by is not None:
                    due.append(self._check_drain(executor, now))
                due.append(executor.alive_at + self._heartbeat_timeout_s - now)
                if executor.deadline is not None:
                    due.append(executor.deadline - now)
        return min(due, default=None)

    def _check_drain(self, executor: Executor, now: float) -> float:
        """Empty a lane that has been draining too long. Returns seconds until it is, 0 when it is time."""
        assert executor.drain_by is not None
        if now < executor.drain_by:
            return executor.drain_by - now
        log.info("drained too long: what is left goes back to the queue", executor=executor.name)
        executor.drain_by = None
        self._scheduler.vacate(executor.lane, now)
        return 0.0

    def lose(self, executor: Executor, now: float, reason: str, guilty: list[int] | None = None) -> None:
        """End an executor's epoch; its sequences wait for another one."""
        log.warning("executor lost", executor=executor.name, epoch=executor.lane.epoch, reason=reason)
        self._forget(executor)
        self._note_loss(executor.name, reason, now)
        if self.ring is not None:
            self.ring.lost(executor.lane, reason, now)
        self._scheduler.detach(executor.lane, now, guilty=guilty or (), reason=reason)
        self._send(executor.peer, encode(Reset(executor.lane.epoch, reason[:1000])))

    def _note_loss(self, name: str, reason: str, now: float) -> None:
        self.losses.pop(name, None)
        self.losses[name] = reason, now
        if len(self.losses) > MAX_LOSSES:
            del self.losses[next(iter(self.losses))]

    def _forget(self, executor: Executor) -> None:
        del self._by_peer[executor.peer]
        del self._by_epoch[executor.lane.epoch]
        self._tickets.forget(executor.lane.epoch)
        self.models_changed = True

    def reset_all(self) -> None:
        """At shutdown: no executor should keep state of ours."""
        for executor in list(self._by_peer.values()):
            self._send(executor.peer, encode(Reset(executor.lane.epoch, "the scheduler stops")))
