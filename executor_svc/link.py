"""The conversation with the scheduler: attach, run plans one at a time, leave.

    Hello ─▶ Welcome(epoch) ─▶ Plan ─▶ Result ─▶ Plan …    until Drain, a stop, or the end of the epoch
      ▲                                              │
      └──── Reset, unknown epoch, scheduler lost ◀───┘

All of it runs in one thread; only the heartbeat has another. Whatever ends an epoch drops every sequence: the scheduler
has them all and sends them again.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import structlog
import zmq
from zmq.utils.monitor import recv_monitor_message

from common.sockets import watch
from common.waker import Waker
from common.wire import (
    Alive,
    Drain,
    Fault,
    Fetch,
    Hello,
    Leaving,
    Lend,
    Message,
    Plan,
    Recall,
    Refused,
    Reset,
    Result,
    Welcome,
    WireError,
)
from common.wire import decode as decode_message
from common.wire import encode as encode_message
from common.wire.executor import no_slots
from executor_svc.faults import FatalError
from executor_svc.handover import Exchange
from executor_svc.heartbeat import Heartbeat, Pulse
from executor_svc.sockets import WHY_FAILED, Dialing
from executor_svc.status_file import show_status
from executor_svc.unanswered import Unanswered

RETRY_INTERVALS = 3
"""Hello intervals between a refusal and the next try."""
REMIND_S = 10.0
"""A wait that goes on is logged this often."""
PATIENCE_S = 1.0
"""So long the first wait is not worth a line."""
_HANDSHAKE_FAILED = sum(WHY_FAILED)


class RefusedError(Exception):
    """The scheduler will not have this executor, and asking again would not help."""


class Handler(Protocol):
    """What runs the plans."""

    def run(self, plan: Plan) -> Result | Fault:
        """Run one iteration. Raises only `FatalError`."""

    def reset(self) -> None:
        """Forget every sequence."""


@dataclass(frozen=True)
class LinkOptions:
    dialing: Dialing
    hello_interval_s: float = 1.0
    grace_s: float = 10.0
    """How long a stopping executor goes on serving while its sequences are moved."""
    status_file: Path | None = None
    """Exists while the executor is attached: a health check that asks nobody."""


class Link:
    """One executor's attachment to the scheduler, for as long as the process lives."""

    def __init__(self, options: LinkOptions, hello: Hello, handler: Handler, exchange: Exchange | None = None) -> None:
        """The link starts the exchange, and closes it. None: no hand-overs."""
        self.options, self.hello, self.handler, self.exchange = options, hello, handler, exchange
        self.epoch = 0
        """0: not attached."""
        self.junk: Counter[str] = Counter()
        """Messages that were dropped, by why."""
        self._log: Any = structlog.get_logger().bind(scheduler=options.dialing.address)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._waker = Waker()
        if exchange is not None:
            exchange.tell = self._waker.wake
        self._heartbeat: Heartbeat | None = None
        self._hello_bytes = encode_message(hello)
        self._hello_due = 0.0
        self._unanswered = Unanswered(options.dialing.timeout_s)
        self._remind_at = time.monotonic() + PATIENCE_S
        self._failed_handshake = 0
        """The monitor's event of the last one that was logged, since an attachment."""
        self._refusal = ""
        """Why the scheduler would not have this executor when it asked last."""
        self._iteration = 0
        self._faulted = False
        self._stop_reason = ""
        self._leave_by = 0.0
        self._dialled_at = 0.0
        self._redial_at: float | None = None
        self._done = False

    def run(self) -> None:
        """Serve until drained or stopped. Raises `RefusedError`, `FatalError`."""
        if self.exchange is not None:
            self.exchange.start()
        try:
            while not self._done:
                self._dial()
                while not (self._done or self._must_redial()):
                    self._turn()
                self._hang_up()
        finally:
            show_status(self.options.status_file, attached=False)
            self._hang_up()
            if self.exchange is not None:
                self.exchange.close()
            self._context.term()
            self._waker.close()

    @property
    def is_stopping(self) -> bool:
        """Whether `request_stop` was called."""
        return bool(self._stop_reason)

    def request_stop(self, reason: str) -> None:
        """Ask for a clean end; may be called from a signal handler or another thread."""
        self._stop_reason = reason
        self._waker.wake()

    def wake_at_signals(self) -> None:
        """For a link that runs in the main thread, whose handlers of signals call `request_stop`."""
        self._waker.wake_at_signals()

    def _must_redial(self) -> bool:
        return self._redial_at is not None and time.monotonic() >= self._redial_at

    def _redial(self) -> None:
        """ZeroMQ gives a connection up for good after a protocol error, so a broken one is always made anew."""
        self._redial_at = max(time.monotonic(), self._dialled_at + self.options.hello_interval_s)

    def _dial(self) -> None:
        self._dialled_at = time.monotonic()
        self._redial_at = None
        self._unanswered.dialled()
        self._hello_due = 0.0
        self._dealer = self.options.dialing.open(self._context)
        self._monitor = watch(self._dealer, zmq.EVENT_DISCONNECTED | _HANDSHAKE_FAILED)
        self._poller = zmq.Poller()
        for item in (self._dealer, self._monitor, self._waker):
            self._poller.register(item, zmq.POLLIN)
        self._is_open = True

    def _hang_up(self) -> None:
        self._stop_heartbeat()
        if getattr(self, "_is_open", False):
            self._is_open = False
            self._dealer.monitor(None, 0)
            self._monitor.close(linger=0)
            self._dealer.close()

    def _stop_heartbeat(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.stop()
            self._heartbeat = None

    def _turn(self) -> None:
        """One round: say what is due, wait, take in what came."""
        deadline = self._speak()
        if self._done:
            return
        patience_ms = None if deadline is None else max(0, int((deadline - time.monotonic()) * 1000) + 1)
        ready = dict(self._poller.poll(patience_ms))
        self._waker.clear()
        if self._monitor in ready:
            self._on_connection_event()
        if ready.get(self._dealer, 0) & zmq.POLLIN:
            self._receive()
        self._check_heartbeat()

    def _speak(self) -> float | None:
        """Say what is due; returns when the next is."""
        now = time.monotonic()
        for answer in self.exchange.answers() if self.exchange is not None else ():
            self._send(answer)
        if self._stop_reason:
            return self._leave(now)
        if self.epoch:
            return None
        if self._redial_at is not None:
            return self._redial_at
        if now >= self._hello_due:
            if self._unanswered.gives_up(now):
                self._redial()
                return self._redial_at
            sent = self._send_bytes(self._hello_bytes)
            if sent:
                self._unanswered.asked(now)
            # Not connected yet: the poller tells when it is.
            self._poller.modify(self._dealer, zmq.POLLIN if sent else zmq.POLLIN | zmq.POLLOUT)
            self._hello_due = now + self.options.hello_interval_s if sent else 0.0
            self._remind("waiting for the scheduler", connected=sent)
        return self._hello_due or now + REMIND_S

    def _remind(self, event: str, **details: object) -> None:
        """Log a wait now, and again only after a while."""
        now = time.monotonic()
        if now >= self._remind_at:
            self._log.info(event, **details)
            self._remind_at = now + REMIND_S

    def _leave(self, now: float) -> float:
        if not self.epoch:
            self._done = True
        elif not self._leave_by:
            self._leave_by = now + self.options.grace_s
            self._log.info("leaving", epoch=self.epoch, reason=self._stop_reason, grace_s=self.options.grace_s)
            self._send(Leaving(epoch=self.epoch, reason=self._stop_reason))
        elif now >= self._leave_by:
            self._log.warning("left before the scheduler let go", epoch=self.epoch)
            self._done = True
        return self._leave_by

    def _on_connection_event(self) -> None:
        event = int(recv_monitor_message(self._monitor)["event"])
        if self._redial_at is not None:
            return
        if event & _HANDSHAKE_FAILED:
            if self._failed_handshake != event:
                self._failed_handshake = event
                self._log.warning("no connection to the scheduler", reason=WHY_FAILED[event])
        elif self.epoch:
            self._log.warning("connection lost", epoch=self.epoch)
            self._forget()
        self._redial()

    def _check_heartbeat(self) -> None:
        heartbeat = self._heartbeat
        if heartbeat is None or heartbeat.pulse is Pulse.FINE:
            return
        if heartbeat.pulse is Pulse.UNKNOWN:
            self._log.warning("the scheduler does not know this epoch", epoch=self.epoch)
        else:
            self._log.warning("no sign of the scheduler", epoch=self.epoch, silent_s=self.options.dialing.timeout_s)
            self._redial()
        self._forget()

    def _forget(self) -> None:
        """The epoch is over: drop all sequences and be ready to say Hello again."""
        self._stop_heartbeat()
        show_status(self.options.status_file, attached=False)
        if self.exchange is not None:
            self.exchange.forget()
        self.handler.reset()
        self.epoch = 0
        self._faulted = False
        self._hello_due = 0.0
        if self._stop_reason:
            self._done = True

    def _receive(self) -> None:
        frames = self._dealer.recv_multipart(zmq.DONTWAIT)
        self._unanswered.answered()
        if len(frames) != 1:
            self._drop("multipart", frames=len(frames))
            return
        try:
            received = decode_message(frames[0])
        except WireError as error:
            self._drop("undecodable", error=str(error))
            return
        if isinstance(received, Plan):
            self._on_plan(received)
        elif isinstance(received, Welcome):
            self._on_welcome(received)
        elif isinstance(received, Refused):
            self._on_refused(received)
        elif isinstance(received, Lend | Fetch | Recall):
            self._on_order(received)
        elif isinstance(received, Reset | Drain):
            self._on_end(received)
        elif not isinstance(received, Alive):  # by which the scheduler only tries whether this connection still stands
            self._drop("unexpected", message=type(received).__name__)

    def _drop(self, why: str, **details: object) -> None:
        """Junk never kills: it is counted, and logged at the 1st, 2nd, 4th, 8th … time."""
        self.junk[why] += 1
        count = self.junk[why]
        if count & (count - 1) == 0:
            self._log.warning("dropped a message", why=why, count=count, **details)

    def _on_welcome(self, welcome: Welcome) -> None:
        # An epoch would be of no use on a connection that is about to be closed: the next one asks again.
        if welcome.epoch in (0, self.epoch) or self._redial_at is not None:
            self._drop("welcome", epoch=welcome.epoch)
            return
        if self.epoch:
            self._forget()
        if self._done:
            return
        self.epoch = welcome.epoch
        self._iteration = 0
        self._remind_at = 0.0
        self._refusal, self._failed_handshake = "", 0
        self._poller.modify(self._dealer, zmq.POLLIN)
        interval_s = welcome.heartbeat_ms / 1000
        self._heartbeat = Heartbeat(self._context, self.options.dialing, self.epoch, interval_s, self._waker.wake)
        show_status(self.options.status_file, attached=True)
        self._log.info("attached", epoch=self.epoch, name=self.hello.name, model=self.hello.model.name)

    def _on_refused(self, refused: Refused) -> None:
        if self.epoch:
            self._drop("refused", reason=refused.reason)
        elif not refused.retry:
            raise RefusedError(refused.reason)
        else:
            # A Hello carries the tokenizer, so one that is refused again and again should be rare.
            self._hello_due = time.monotonic() + RETRY_INTERVALS * self.options.hello_interval_s
            if self._refusal != refused.reason:
                self._refusal = refused.reason
                self._log.warning("the scheduler asks to try again later", reason=refused.reason)

    def _on_end(self, end: Reset | Drain) -> None:
        if not self.epoch or end.epoch != self.epoch:
            self._drop("stale", message=type(end).__name__, epoch=end.epoch)
        elif isinstance(end, Drain):
            self._log.info("drained", epoch=self.epoch)
            self._done = True
        else:
            self._log.warning("reset by the scheduler", epoch=self.epoch, reason=end.reason)
            self._forget()

    def _on_order(self, order: Lend | Fetch | Recall) -> None:
        if self.exchange is None or not self.epoch or order.epoch != self.epoch:
            self._drop("stale", message=type(order).__name__, epoch=order.epoch)
        else:
            self.exchange.take(order)

    def _on_plan(self, plan: Plan) -> None:
        if plan.epoch != self.epoch or self._faulted:
            self._drop("stale", message="Plan", epoch=plan.epoch, iteration=plan.iteration)
            return
        if plan.iteration <= self._iteration:
            self._drop("repeated", iteration=plan.iteration)
            return
        if self._iteration and plan.iteration != self._iteration + 1:
            answer: Result | Fault = Fault(
                self.epoch, plan.iteration, no_slots(), "order", f"plan {plan.iteration} came after {self._iteration}"
            )
        else:
            answer = self._run(plan)
        self._iteration = plan.iteration
        if isinstance(answer, Fault):
            self._log.error("fault", iteration=plan.iteration, reason=answer.reason, message=answer.message)
            self._faulted = True
            self.handler.reset()
        self._answer(plan, answer)

    def _run(self, plan: Plan) -> Result | Fault:
        try:
            return self.handler.run(plan)
        except FatalError as error:
            self._send(error.fault)
            raise

    def _answer(self, plan: Plan, answer: Result | Fault) -> None:
        """Send the outcome of a plan, unless the epoch ended meanwhile."""
        if self._heartbeat is None or self._heartbeat.pulse is not Pulse.FINE:
            return
        try:
            self._send(answer)
        except WireError as error:
            self._log.error("an answer does not fit the wire", error=str(error))
            self._faulted = True
            self.handler.reset()
            self._send(Fault(plan.epoch, plan.iteration, no_slots(), "wire", str(error)[:4096]))

    def _send(self, value: Message) -> bool:
        return self._send_bytes(encode_message(value))

    def _send_bytes(self, data: bytes) -> bool:
        """Whether it could be handed over. If not, the connection is down, and its monitor tells of that."""
        try:
            self._dealer.send(data, zmq.DONTWAIT)
        except zmq.Again:
            return False
        return True
