"""Starts the child processes, each on a listening socket that it inherits, and starts a dead one anew."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from dataclasses import dataclass

import structlog

from common.processes import end_with_parent
from scheduler_svc.settings import SchedulerSettings

log = structlog.get_logger()

MAX_BACKOFF_S = 5.0
SUSPENDED_S = 2.0
"""The core looks at its frontends more often than this; when it did not, it may have been stopped itself."""
STABLE_S = 10.0
"""A child that lived so long restarts at once when it dies."""


class PortTaken(Exception):
    """An address for HTTP cannot be bound."""


def listen(host: str, port: int) -> socket.socket:
    """A listening socket that children accept from. Raises `PortTaken` with a plain text."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        raise PortTaken(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    listener.listen(2048)
    listener.set_inheritable(True)
    return listener


@dataclass(slots=True)
class _Child:
    name: str
    command: list[str]
    fd: int
    """The listening socket."""
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    failures: int = 0
    restart_at: float = 0.0
    heard_at: float | None = None
    """When it last sent anything; None before it has said hello."""


class Supervisor:
    """The frontends, and what else is added. `check` is called by the core's loop; it never blocks."""

    def __init__(self, settings: SchedulerSettings, listener: socket.socket, core_address: str) -> None:
        self._settings = settings
        self._checked_at = 0.0
        self._children: list[_Child] = []
        for i in range(settings.frontends):
            name = f"frontend-{i}"
            limits = ["--grace-s", str(settings.grace_s), "--max-body-mb", str(settings.max_body_mb)]
            self.add(name, listener, "scheduler_svc.frontend", "--core", core_address, "--name", name, *limits)

    def add(self, name: str, listener: socket.socket, module: str, *flags: str) -> None:
        """One more child: `module` as a program, with these flags, `--fd` and those of the log."""
        log_flags = ["--log-format", self._settings.log_format, "--log-level", self._settings.log_level]
        fd = listener.fileno()
        command = [sys.executable, "-m", module, *flags, "--fd", str(fd), *log_flags]
        self._children.append(_Child(name, command, fd))

    def start(self, now: float) -> None:
        for child in self._children:
            self._spawn(child, now)

    def _spawn(self, child: _Child, now: float) -> None:
        # A session of its own: Ctrl-C reaches the core alone, which then ends its children in order.
        child.started_at, child.heard_at = now, None
        try:
            child.process = subprocess.Popen(
                child.command, pass_fds=[child.fd], start_new_session=True, preexec_fn=end_with_parent
            )
        except OSError as error:
            child.failures += 1
            child.restart_at = now + MAX_BACKOFF_S
            log.error("child process could not be started", child=child.name, error=str(error))
            return
        log.info("child process started", child=child.name, pid=child.process.pid)

    def heard(self, name: str, now: float) -> None:
        """A message came from the frontend of this name."""
        for child in self._children:
            if child.name == name:
                child.heard_at = now

    def _end_the_silent(self, now: float) -> None:
        """SIGKILL to those that hang: their clients would wait for ever."""
        was_suspended, self._checked_at = now - self._checked_at > SUSPENDED_S, now
        for child in self._children:
            if child.process is None or child.heard_at is None:
                continue
            if was_suspended:
                child.heard_at = now
            elif now - child.heard_at > self._settings.frontend_timeout_s:
                log.error("frontend hangs: killed", frontend=child.name, silent_s=round(now - child.heard_at, 1))
                child.process.kill()
                child.heard_at = None

    def check(self, now: float) -> tuple[list[str], float | None]:
        """End what hangs, restart what is due.

        Returns the names of children found dead, and seconds until the next restart.
        """
        dead, due = [], None
        self._end_the_silent(now)
        for child in self._children:
            if child.process is not None and child.process.poll() is not None:
                dead.append(child.name)
                child.failures = 0 if now - child.started_at > STABLE_S else child.failures + 1
                delay = min(MAX_BACKOFF_S, 0.1 * 2**child.failures) if child.failures else 0.0
                child.restart_at = now + delay
                log.warning("child process died", child=child.name, status=child.process.returncode, restart_in_s=delay)
                child.process = None
            if child.process is None:
                if now >= child.restart_at:
                    self._spawn(child, now)
                else:
                    due = child.restart_at - now if due is None else min(due, child.restart_at - now)
        return dead, due

    def ask_to_end(self) -> None:
        """SIGTERM to all."""
        for child in self._children:
            if child.process is not None:
                child.process.send_signal(signal.SIGTERM)

    def any_running(self) -> bool:
        return any(child.process is not None and child.process.poll() is None for child in self._children)

    def kill(self, name: str = "") -> None:
        """SIGKILL to the child of this name; without one, to all that are left, and wait for them."""
        for child in self._children:
            if child.process is not None and name in ("", child.name):
                child.process.kill()
                if not name:
                    child.process.wait()
