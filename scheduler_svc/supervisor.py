"""Starts the child processes: frontends, what runs batches, the admin API. Starts a dead one anew."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass

import structlog

from common.processes import end_with_parent
from scheduler_svc.child_settings import FRONTENDS_OWN
from scheduler_svc.restarts import Restarts
from scheduler_svc.settings import SchedulerSettings

log = structlog.get_logger()

FIRST_DELAY_S, LONGEST_DELAY_S, STABLE_S = 0.2, 5.0, 10.0
"""Of `Restarts`: clients wait, and these processes start within seconds."""


class PortTaken(Exception):
    """An address for HTTP cannot be bound."""


def listen(host: str, port: int) -> socket.socket:
    """A listening socket that children accept from. Raises `PortTaken` with a plain text."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise PortTaken(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise PortTaken(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    listener.set_inheritable(True)
    return listener


@dataclass(slots=True)
class _Child:
    name: str
    """Also its identity towards the core."""
    command: list[str]
    fd: int | None
    """The listening socket that it inherits."""
    restarts: Restarts
    process: subprocess.Popen[bytes] | None = None
    heard_at: float | None = None
    """When it last sent anything; None before it has said hello."""


class Supervisor:
    """The core's clients, and what else is added. `check` is called by the core's loop; it never blocks."""

    def __init__(self, settings: SchedulerSettings, listener: socket.socket, core_address: str) -> None:
        self._settings = settings
        self._children: list[_Child] = []
        for i in range(settings.frontends):
            self._add_client(f"frontend-{i}", "scheduler_svc.frontend", core_address, listener)
        if settings.serves_batches:
            limits = ["--batch-max-in-flight", str(settings.batch_max_in_flight)]
            limits += ["--batch-model-wait-s", str(settings.batch_model_wait_s)]
            self._add_client("batch-runner", "scheduler_svc.batch_runner", core_address, None, *limits)

    def add(self, name: str, listener: socket.socket | None, module: str, *flags: str) -> None:
        """One more child: `module` as a program, with these flags, `--fd` of the listener, and those of the log."""
        command = [sys.executable, "-m", module, *flags]
        command += ["--log-format", self._settings.log_format, "--log-level", self._settings.log_level]
        fd = None if listener is None else listener.fileno()
        if fd is not None:
            command += ["--fd", str(fd)]
        restarts = Restarts(first_delay_s=FIRST_DELAY_S, longest_delay_s=LONGEST_DELAY_S, stable_s=STABLE_S)
        self._children.append(_Child(name, command, fd, restarts))

    def _add_client(
        self, name: str, module: str, core_address: str, listener: socket.socket | None, *flags: str
    ) -> None:
        """A frontend, or what takes its requests from elsewhere."""
        settings = self._settings
        limits = [
            *("--grace-s", str(settings.grace_s)),
            *("--batch-max-file-mb", str(settings.batch_max_file_mb)),
            *("--batch-max-tenant-mb", str(settings.batch_max_tenant_mb)),
            "--open-metrics" if settings.open_metrics else "--no-open-metrics",
            "--allow-no-api-keys" if settings.allow_no_api_keys else "--no-allow-no-api-keys",
        ]
        # Unless the scheduler was told, what the frontends find in a table of their own holds.
        for field in FRONTENDS_OWN:
            if field in settings.model_fields_set:
                limits += [f"--{field.replace('_', '-')}", str(getattr(settings, field))]
        if settings.batch_dir is not None:
            limits += ["--batch-dir", str(settings.batch_dir)]
        if settings.api_keys is not None:
            limits += ["--api-keys", str(settings.api_keys)]
        self.add(name, listener, module, "--core", core_address, "--name", name, *limits, *flags)

    def start(self, now: float) -> None:
        for child in self._children:
            self._spawn(child, now)

    def _environment(self) -> dict[str, str]:
        """Ours, with what is secret: a command line can be read by every user of the machine."""
        environment = dict(os.environ)
        if self._settings.api_key is not None:
            environment["GILIR_API_KEY"] = self._settings.api_key.get_secret_value()
        if self._settings.batch_database is not None:
            environment["GILIR_BATCH_DATABASE"] = self._settings.batch_database
        return environment

    def _spawn(self, child: _Child, now: float) -> None:
        # A session of its own: Ctrl-C reaches the core alone, which then ends its children in order.
        child.restarts.started(now)
        child.heard_at = None
        try:
            child.process = subprocess.Popen(
                child.command,
                env=self._environment(),
                pass_fds=[] if child.fd is None else [child.fd],
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        except OSError as error:
            delay = child.restarts.ended(now)
            log.error("child could not be started", child=child.name, error=str(error), restart_in_s=delay)
            return
        log.info("child started", child=child.name, pid=child.process.pid)

    def heard(self, name: str, now: float) -> None:
        """A message came from the child of this name."""
        for child in self._children:
            if child.name == name:
                child.heard_at = now

    def excuse(self, stalled_s: float, now: float) -> None:
        """This process stood still so long, and perhaps the whole machine: no child was silent meanwhile."""
        for child in self._children:
            if child.heard_at is not None:
                child.heard_at = min(now, child.heard_at + stalled_s)

    def _end_the_silent(self, now: float) -> None:
        """SIGKILL to those that hang: their clients would wait for ever."""
        for child in self._children:
            if child.process is None or child.heard_at is None:
                continue
            if now - child.heard_at > self._settings.frontend_timeout_s:
                log.error("child hangs: killed", child=child.name, silent_s=round(now - child.heard_at, 1))
                child.process.kill()
                child.heard_at = None

    def check(self, now: float) -> tuple[list[str], float | None]:
        """End what hangs, restart what is due.

        Returns the names of those found dead, and seconds until the next restart.
        """
        dead, due = [], None
        self._end_the_silent(now)
        for child in self._children:
            if child.process is not None and child.process.poll() is not None:
                dead.append(child.name)
                delay = child.restarts.ended(now)
                log.warning("child died", child=child.name, status=child.process.returncode, restart_in_s=delay)
                child.process = None
            if child.process is None and now >= child.restarts.due_at:
                self._spawn(child, now)
            if child.process is None:
                wait = child.restarts.due_at - now
                due = wait if due is None else min(due, wait)
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
