"""Starts the frontend processes on one listening socket, and starts a dead one anew."""

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
STABLE_S = 10.0
"""A frontend that lived so long restarts at once when it dies."""


class PortTaken(Exception):
    """The REST address cannot be bound."""


def listen(host: str, port: int) -> socket.socket:
    """The listening socket that all frontends accept from. Raises `PortTaken` with a plain text."""
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
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    failures: int = 0
    restart_at: float = 0.0


class Supervisor:
    """The frontend children. `check` is called by the core's loop; it never blocks."""

    def __init__(self, settings: SchedulerSettings, listener: socket.socket) -> None:
        self._settings, self._listener = settings, listener
        self._children = [_Child(f"frontend-{i}") for i in range(settings.frontends)]

    def start(self, now: float) -> None:
        for child in self._children:
            self._spawn(child, now)

    def _spawn(self, child: _Child, now: float) -> None:
        fd = self._listener.fileno()
        command = [
            *(sys.executable, "-m", "scheduler_svc.frontend"),
            *("--core", self._settings.frontend_address, "--name", child.name, "--fd", str(fd)),
            *("--grace-s", str(self._settings.grace_s), "--max-body-mb", str(self._settings.max_body_mb)),
            *("--log-format", self._settings.log_format, "--log-level", self._settings.log_level),
        ]
        # A session of its own: Ctrl-C reaches the core alone, which then ends its children in order.
        child.process = subprocess.Popen(command, pass_fds=[fd], start_new_session=True, preexec_fn=end_with_parent)
        child.started_at = now
        log.info("frontend started", frontend=child.name, pid=child.process.pid)

    def check(self, now: float) -> tuple[list[str], float | None]:
        """Restart what is due. Returns the names of frontends found dead, and seconds until the next restart."""
        dead, due = [], None
        for child in self._children:
            if child.process is not None and child.process.poll() is not None:
                dead.append(child.name)
                child.failures = 0 if now - child.started_at > STABLE_S else child.failures + 1
                delay = min(MAX_BACKOFF_S, 0.1 * 2**child.failures) if child.failures else 0.0
                child.restart_at = now + delay
                log.warning("frontend died", frontend=child.name, status=child.process.returncode, restart_in_s=delay)
                child.process = None
            if child.process is None:
                if now >= child.restart_at:
                    self._spawn(child, now)
                else:
                    due = child.restart_at - now if due is None else min(due, child.restart_at - now)
        return dead, due

    def end(self, timeout_s: float) -> None:
        """Ask all to end, and kill what has not after `timeout_s`."""
        running = [child.process for child in self._children if child.process is not None]
        for process in running:
            process.send_signal(signal.SIGTERM)
        for process in running:
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
