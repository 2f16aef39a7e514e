"""The core's loop: one thread that blocks on its sockets and drives the pure scheduler."""

from __future__ import annotations

import contextlib
import gc
import signal
import socket
import time
from dataclasses import replace
from types import FrameType

import structlog
import zmq

from common.logs import Seldom
from common.waker import Waker
from common.wire import (
    Abort,
    Ended,
    EndReason,
    FrontendAlive,
    FrontendHello,
    Inquiry,
    Message,
    Stats,
    Submit,
    SubmitCall,
    Watch,
    WireError,
    decode,
    encode,
)
from scheduler_svc.admin.desk import AdminDesk
from scheduler_svc.core import Scheduler, account_of
from scheduler_svc.membership import Membership
from scheduler_svc.offer import Offer
from scheduler_svc.plan_log import PlanLog, RecordedScheduler
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.sockets import (
    authenticator,
    executor_socket,
    frontend_socket,
    private_folder,
    watch_disconnects,
)
from scheduler_svc.stalls import Stalls
from scheduler_svc.stats import gather, kept_gauges
from scheduler_svc.supervisor import Supervisor
from scheduler_svc.watching.watcher import Watcher

log = structlog.get_logger()

BEAT_S = 0.25
"""Frontends hear from the core at least this often; `/health/live` fails when they do not."""
CHECK_S = 60.0
MAX_DRAIN = 1000
"""Messages taken from one socket before the other things get a turn."""


def _plan_log(settings: SchedulerSettings) -> PlanLog | None:
    if settings.plan_log is None:
        return None
    return PlanLog(
        settings.plan_log, segment_bytes=settings.plan_log_segment_mb << 20, max_segments=settings.plan_log_segments
    )


def _scheduler(settings: SchedulerSettings, plan_log: PlanLog | None) -> Scheduler:
    # Epochs of an earlier scheduler, which executors may still hold, must not come again.
    config, first_epoch = settings.scheduler_config(), time.time_ns() // 1_000_000
    if plan_log is None:
        return Scheduler(config, first_epoch=first_epoch)
    return RecordedScheduler(config, plan_log, first_epoch=first_epoch)


class CoreLoop:
    """Owns the sockets. `run` returns when the service has been stopped."""

    def __init__(
        self, settings: SchedulerSettings, listener: socket.socket, admin_listener: socket.socket | None = None
    ) -> None:
        """`listener`: the listening socket of the REST API; `admin_listener`: that of the admin API, where wanted."""
        self._settings = settings
        self._plan_log = _plan_log(settings)
        self._scheduler = _scheduler(settings, self._plan_log)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator = authenticator(self._context, settings)
        self._executors = executor_socket(self._context, settings)
        self._monitor = watch_disconnects(self._executors)
        self._run_dir = private_folder(settings.run_dir)
        address = f"ipc://{self._run_dir}/core.sock"
        self._frontends = frontend_socket(self._context, address)
        self._membership = Membership(
            self._scheduler,
            self._send_executor,
            heartbeat_ms=settings.heartbeat_ms,
            heartbeat_timeout_s=settings.heartbeat_timeout_s,
            iteration_timeout_s=settings.iteration_timeout_s,
            iteration_floor_s=settings.iteration_floor_s,
            encode_plan=self._scheduler.encoded if isinstance(self._scheduler, RecordedScheduler) else encode,
        )
        self._watcher = Watcher(self._scheduler, self._membership, newest=time.time_ns() // 1_000_000)
        self._supervisor = Supervisor(settings, listener, address)
        self._desk = None if admin_listener is None else self._open_desk(admin_listener)
        self._offer = Offer(self._scheduler)
        self._junk_seen = Seldom()
        self._peers: list[bytes] = []
        """Frontends by their number in the core."""
        self._kept: dict[bytes, FrontendAlive] = {}
        """What each frontend keeps for clients who resume streams."""
        self._next_beat = self._next_check = 0.0
        self._stalls = Stalls()
        self._num_checks = 0
        self._stopping_since: float | None = None
        self._hurried = False
        self._waker = Waker()
        self._poller = zmq.Poller()
        for readable in (self._frontends, self._executors, self._monitor, self._waker):
            self._poller.register(readable, zmq.POLLIN)
        if self._desk is not None:
            self._poller.register(self._desk.socket, zmq.POLLIN)

    def _open_desk(self, listener: socket.socket) -> AdminDesk:
        address, key_file = f"ipc://{self._run_dir}/admin.sock", self._settings.admin_key_file
        key_flags = [] if key_file is None else ["--key-file", str(key_file)]
        self._supervisor.add("admin", listener, "scheduler_svc.admin", "--core", address, *key_flags)
        desk_socket = frontend_socket(self._context, address)
        return AdminDesk(
            desk_socket, self._scheduler, self._membership, lambda now: self._supervisor.heard("admin", now)
        )

    # --- life ---

    def run(self) -> None:
        """Serve until SIGTERM or SIGINT; then let running work end within the grace."""
        self._waker.wake_at_signals()
        signal.signal(signal.SIGTERM, self._handle_stop)
        signal.signal(signal.SIGINT, self._handle_stop)
        signal.signal(signal.SIGCHLD, lambda _signal, _frame: None)
        self._supervisor.start(time.monotonic())
        # What the start has made stays; the collector need not go through it again.
        gc.collect()
        gc.freeze()
        try:
            wait_s = 0.0
            self._stalls.begin(time.monotonic(), time.thread_time())
            while not self._finished(time.monotonic()):
                wait_s = self._turn(wait_s)
        finally:
            self._close()

    def _handle_stop(self, _signal: int, _frame: FrameType | None) -> None:
        if self._stopping_since is None:
            self._stopping_since = time.monotonic()
            self._next_beat = 0.0
        else:
            self._hurried = True

    def _finished(self, now: float) -> bool:
        if self._stopping_since is None:
            return False
        return self._hurried or not self._scheduler.live or now - self._stopping_since >= self._settings.grace_s

    def _close(self) -> None:
        self._scheduler.end_all(EndReason.SHUTDOWN, "the service is stopping", time.monotonic())
        self._flush()
        self._beat(time.monotonic())
        self._membership.reset_all()
        self._end_frontends(timeout_s=1.0 if self._hurried else 5.0)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._executors.monitor(None, 0)
        self._monitor.close(0)
        self._frontends.close()
        if self._desk is not None:
            self._desk.socket.close()
        self._executors.close()
        self._context.term()
        self._waker.close()
        if self._plan_log is not None:
            self._plan_log.close()
        for path in (*self._run_dir.glob("core.sock*"), self._run_dir / "admin.sock"):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # other files may lie in a folder that the operator chose
            self._run_dir.rmdir()
        log.info("stopped")

    def _end_frontends(self, timeout_s: float) -> None:
        """Ask the frontends to end, and answer what they still send until they have."""
        self._stopping_since = self._stopping_since or time.monotonic()
        deadline = time.monotonic() + timeout_s
        self._supervisor.ask_to_end()
        while self._supervisor.any_running() and time.monotonic() < deadline:
            self._frontends.poll(50)
            self._drain_frontends(time.monotonic())
            self._flush()
        self._supervisor.kill()

    # --- one turn ---

    def _turn(self, wait_s: float) -> float:
        """Wait for something to do, do it, and return how long the next wait may be."""
        ready = dict(self._poller.poll(max(0, int(wait_s * 1000 + 0.999))))
        now = time.monotonic()
        stalled_s = self._stalls.passed(now, time.thread_time(), wait_s)
        if stalled_s:
            self._membership.excuse(stalled_s, now)
            self._supervisor.excuse(stalled_s, now)
        if self._waker.fileno() in ready:
            self._waker.clear()
        if self._monitor in ready:
            self._drain_monitor()
            self._membership.connection_broken(now)
        if self._executors in ready:
            self._drain_executors(now)
        if self._frontends in ready:
            self._drain_frontends(now)
        if self._desk is not None and self._desk.socket in ready:
            self._desk.serve(now)
        dues = [self._membership.check(now)]
        if self._stopping_since is None:
            dead, due = self._supervisor.check(now)
            dues.append(due)
            for name in dead:
                self._lose_frontend(name.encode(), now)
        expiry = self._scheduler.expire(now)
        # The executors first: they compute while the frontends are told.
        self._membership.plan_idle_lanes(now)
        self._flush()
        if self._announce_models(now) or self._membership.models_changed:
            self._membership.models_changed = False
            self._next_beat = now
        if now >= self._next_beat:
            self._check_when_idle(now)
            self._watcher.check(now)
            self._beat(now)
            self._next_beat = now + BEAT_S
        dues += [self._next_beat - now, None if expiry is None else expiry - now]
        return max(0.0, min(due for due in dues if due is not None))

    def _check_when_idle(self, now: float) -> None:
        """Now and then, with nothing to do, see that the books balance. A fault ends the process: it would spread."""
        if not self._scheduler.live and now >= self._next_check:
            self._next_check = now + CHECK_S
            self._num_checks += 1
            self._scheduler.check_invariants(self._num_checks)

    def _drain_monitor(self) -> None:
        with contextlib.suppress(zmq.Again):
            for _ in range(MAX_DRAIN):
                self._monitor.recv_multipart(zmq.NOBLOCK)

    def _drain_executors(self, now: float) -> None:
        for _ in range(MAX_DRAIN):
            try:
                parts = self._executors.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(parts) == 2:
                self._membership.receive(parts[0], parts[1], now)
            else:
                self._membership.receive(parts[0], b"", now)

    def _drain_frontends(self, now: float) -> None:
        for _ in range(MAX_DRAIN):
            try:
                parts = self._frontends.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = decode(parts[1]) if len(parts) == 2 else None
            except WireError as error:
                if self._junk_seen.happens():
                    log.warning("junk on the frontends' socket dropped", error=str(error), count=self._junk_seen.count)
                continue
            self._from_frontend(parts[0], message, now)

    def _from_frontend(self, peer: bytes, message: Message | None, now: float) -> None:
        owner = self._owner(peer)
        self._supervisor.heard(peer.decode(errors="replace"), now)
        match message:
            case FrontendAlive():
                self._kept[peer] = message
            case FrontendHello():
                self._scheduler.abort_owner(owner, now)
                self._send_frontend(owner, encode(self._offer.told))
                self._send_frontend(owner, encode(self._stats()))
            case Submit() | SubmitCall() if self._stopping_since is not None:
                self._scheduler.refuse(owner, message, Ended(0, EndReason.SHUTDOWN, message="the service is stopping"))
            case Submit() | SubmitCall():
                self._scheduler.submit(owner, message, now)
            case Inquiry():
                account = account_of(self._scheduler, message, now)
                self._send_frontend(owner, encode(account))
            case Watch():
                self._send_frontend(owner, encode(self._watcher.answer(message, now)))
            case Abort():
                self._scheduler.abort(owner, message.streams.tolist(), now, stopped=message.stopped)
            case _:
                if self._junk_seen.happens():
                    log.warning("unexpected message on the frontends' socket dropped", kind=type(message).__name__)

    # --- frontends ---

    def _owner(self, peer: bytes) -> int:
        if peer not in self._peers:
            self._peers.append(peer)
        return self._peers.index(peer)

    def _lose_frontend(self, peer: bytes, now: float) -> None:
        if peer in self._peers:
            self._scheduler.abort_owner(self._peers.index(peer), now)
            self._kept.pop(peer, None)

    def _flush(self) -> None:
        """Send what the scheduler has to tell the frontends."""
        outbox = self._scheduler.outbox
        while outbox:
            messages, self._scheduler.outbox = outbox, []
            for owner, message in messages:
                self._send_frontend(owner, encode(message))
            outbox = self._scheduler.outbox

    def _send_frontend(self, owner: int, data: bytes) -> None:
        try:
            self._frontends.send_multipart([self._peers[owner], data], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            # Gone, or so far behind that its queue is full. Its requests could not be told of their end: it must go.
            self._scheduler.abort_owner(owner, time.monotonic())
            if error.errno == zmq.EAGAIN:
                self._supervisor.kill(self._peers[owner].decode(errors="replace"))

    def _announce_models(self, now: float) -> bool:
        """Tell the frontends what can be asked for, where that has changed. Returns whether it has."""
        serving = self._offer.news(now)
        if serving is not None:
            data = encode(serving)
            for owner in range(len(self._peers)):
                self._send_frontend(owner, data)
        return serving is not None

    def _stats(self) -> Stats:
        stats = gather(self._scheduler, self._membership, stopping=self._stopping_since is not None)
        return replace(stats, gauges=stats.gauges | kept_gauges(self._kept.values()))

    def _beat(self, now: float) -> None:
        data = encode(self._stats())
        for owner in range(len(self._peers)):
            self._send_frontend(owner, data)

    def _send_executor(self, peer: bytes, data: bytes) -> bool:
        try:
            self._executors.send_multipart([peer, data], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True
