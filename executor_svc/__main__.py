"""`python -m executor_svc`: the executor service."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import signal
import sys
from typing import NoReturn

from common.logs import configure_logs
from common.processes import raise_descriptor_limit
from executor_svc.determinism import prepare_environment
from executor_svc.settings import ExecutorSettings


def _stop_loading(_number: int, _frame: object) -> None:
    raise SystemExit(0)


def main(arguments: list[str] | None = None) -> int:
    """Run until drained or stopped. Returns the exit status."""
    settings = ExecutorSettings.from_command_line(arguments, prog="python -m executor_svc")
    configure_logs("executor", settings.log_format, settings.log_level)
    raise_descriptor_limit()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop_loading)
    prepare_environment()
    # Idle OpenMP threads that spin take the cores from the scheduler beside them.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # torch reads the environment when it is first imported.
    service = importlib.import_module("executor_svc.service")
    status: int = service.serve(settings)
    return status


def end(status: int) -> NoReturn:
    """End the process, whose work is closed, without the second of a core that the interpreter takes to undo torch."""
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):  # nobody reads any more
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    end(main())
