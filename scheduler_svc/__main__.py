"""`python -m scheduler_svc`: the scheduler service."""

from __future__ import annotations

import os
import socket
import sys
import tomllib
from pathlib import Path

import structlog
import zmq

from common.logs import configure_logs
from common.processes import raise_descriptor_limit
from common.settings import CONFIG_VARIABLE
from scheduler_svc.admin.key import AdminKey
from scheduler_svc.batches.database import check_storage
from scheduler_svc.child_settings import misplaced
from scheduler_svc.keys import read_keys
from scheduler_svc.loop import CoreLoop
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.supervisor import PortTaken, listen

log = structlog.get_logger()


def main() -> int:
    settings = SchedulerSettings.from_command_line(prog="python -m scheduler_svc")
    if wrong := _misplaced():
        print(*(f"error: {line}" for line in wrong), sep="\n", file=sys.stderr)
        return 2
    configure_logs("scheduler", settings.log_format, settings.log_level)
    raise_descriptor_limit()
    try:
        check_storage(settings.batch_dir, settings.batch_database)
        if settings.api_keys is not None:
            read_keys(settings.api_keys)
        listener = listen(settings.host, settings.port)
        admin_listener = _listen_for_admin(settings)
        loop = CoreLoop(settings, listener, admin_listener)
    except PortTaken as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except zmq.ZMQError as error:
        print(f"error: cannot listen for executors on {settings.executor_bind}: {error.strerror}", file=sys.stderr)
        return 1
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    host, port = listener.getsockname()[:2]
    log.info("listening", url=f"http://{host}:{port}", executors=settings.executor_bind)
    if admin_listener is not None:
        host, port = admin_listener.getsockname()[:2]
        log.info("admin API", url=f"http://{host}:{port}", key=settings.admin_key_file is not None)
    loop.run()
    return 0


def _misplaced() -> list[str]:
    """What stands in the file, which the settings have been read from, for our children and would not hold for them."""
    path = os.environ.get(CONFIG_VARIABLE)
    return misplaced(tomllib.loads(Path(path).read_text()), path) if path else []


def _listen_for_admin(settings: SchedulerSettings) -> socket.socket | None:
    """The listening socket of the admin API, where one is wanted. Raises `PortTaken`, OSError, ValueError."""
    if settings.admin_port is None:
        return None
    if settings.admin_key_file is not None:
        AdminKey.read(settings.admin_key_file)
    try:
        return listen(settings.admin_host, settings.admin_port)
    except PortTaken as error:
        raise PortTaken(f"admin API: {error}") from error


if __name__ == "__main__":
    raise SystemExit(main())
