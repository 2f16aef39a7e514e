"""Runs the services as local processes: what `make demo`, benchmarks and the end-to-end tests stand on."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from common.logs import COMPILING
from common.probe import answers
from common.processes import end_with_parent

ROOT = Path(__file__).resolve().parent.parent


class ServiceFailed(Exception):
    """A service ended by itself, or did not become ready in time; the text holds the end of its log."""


class Process:
    """One service, its log in a file."""

    def __init__(
        self, name: str, arguments: list[str], folder: Path, environment: dict[str, str] | None = None
    ) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self._file: IO[bytes] = self.log.open("ab")
        self.popen = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=self._file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )

    @property
    def pid(self) -> int:
        return self.popen.pid

    def log_tail(self, lines: int = 15) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self, timeout_s: float = 30.0) -> int:
        """SIGTERM, then SIGKILL after `timeout_s`. Returns the exit status."""
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGTERM)
            try:
                self.popen.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.kill()
        self._file.close()
        return self.popen.returncode

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()


class LocalServices:
    """A scheduler and some executors that meet on an ipc socket in a temporary folder."""

    def __init__(self, *, scheduler_flags: list[str] | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="gilir-"))
        self.executor_address = f"ipc://{self.folder}/executors.sock"
        self.processes: list[Process] = []
        self._port = 0
        self._scheduler_flags = scheduler_flags or []
        self.plan_log = self.folder / "plans"
        self._num_executors = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start_scheduler(self, environment: dict[str, str] | None = None) -> Process:
        """Start the scheduler on a free port, which is read from its log; one after it takes the same."""
        flags = ["--host", "127.0.0.1", "--port", str(self._port), "--executor-bind", self.executor_address]
        flags += ["--run-dir", str(self.folder / "run"), "--plan-log", str(self.plan_log), *self._scheduler_flags]
        process = self._start("scheduler", ["-m", "scheduler_svc", *flags], environment)
        self._port = self._read_port(process)
        return process

    def _read_port(self, process: Process, timeout_s: float = 30.0) -> int:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and process.popen.poll() is None:
            for line in process.log.read_text(errors="replace").splitlines():
                if "listening" in line and "http://" in line:
                    return int(line.split("http://", 1)[1].split()[0].rstrip('",}').rsplit(":", 1)[1])
            time.sleep(0.02)
        raise ServiceFailed(f"the scheduler did not start:\n{process.log_tail()}")

    def start_executor(
        self, *flags: str, name: str = "", module: str = "executor_svc", environment: dict[str, str] | None = None
    ) -> Process:
        self._num_executors += 1
        name = name or f"executor-{self._num_executors - 1}"
        arguments = ["-m", module, "--scheduler", self.executor_address, "--name", name, *flags]
        return self._start(name, arguments, environment)

    def _start(self, name: str, arguments: list[str], environment: dict[str, str] | None) -> Process:
        process = Process(name, arguments, self.folder, environment)
        self.processes.append(process)
        return process

    def wait_ready(self, timeout_s: float = 120.0, *, tell: Callable[[str], None] | None = None) -> None:
        """Block until `/health/ready` answers 200. Raises `ServiceFailed` when a service ends before.

        tell: hears, once, that an executor compiles its kernels: that may take most of the time.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self.raise_if_ended()
            if tell is not None and any(COMPILING in process.log_tail() for process in self.processes):
                tell(f"{COMPILING} …")
                tell = None
            if answers(f"{self.url}/health/ready"):
                return
            time.sleep(0.05)
        logs = "\n".join(f"--- {process.name}\n{process.log_tail()}" for process in self.processes)
        raise ServiceFailed(f"not ready after {timeout_s:g} s\n{logs}")

    def raise_if_ended(self) -> None:
        for process in self.processes:
            status = process.popen.poll()
            if status is not None:
                raise ServiceFailed(f"the {process.name} ended with status {status}:\n{process.log_tail()}")

    def stop(self) -> dict[str, int]:
        """Stop the scheduler, whose grace needs the executors, then those. Returns each exit status."""
        statuses = {process.name: process.stop() for process in self.processes}
        shutil.rmtree(self.folder, ignore_errors=True)
        return statuses
