"""`python -m scheduler_svc`: the scheduler service."""

from __future__ import annotations

import sys

import structlog
import zmq

from common.logs import configure_logs
from scheduler_svc.batches.database import check_storage
from scheduler_svc.keys import read_keys
from scheduler_svc.loop import CoreLoop
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.supervisor import PortTaken, listen

log = structlog.get_logger()


def main() -> int:
    settings = SchedulerSettings.from_command_line(prog="python -m scheduler_svc")
    configure_logs("scheduler", settings.log_format, settings.log_level)
    try:
        check_storage(settings.batch_dir, settings.batch_database)
        if settings.api_keys is not None:
            read_keys(settings.api_keys)
        listener = listen(settings.host, settings.port)
        loop = CoreLoop(settings, listener)
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
    loop.run()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
