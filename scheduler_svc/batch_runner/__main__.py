"""`python -m scheduler_svc.batch_runner`: the process that runs batches. The scheduler starts it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from common.logs import configure_logs
from common.processes import raise_descriptor_limit
from scheduler_svc.batch_runner.runner import Runner
from scheduler_svc.batch_runner.settings import RunnerSettings
from scheduler_svc.batches.database import open_database
from scheduler_svc.batches.store_thread import StoreThread
from scheduler_svc.frontend.frontend import Frontend


def main() -> int:
    settings = RunnerSettings.from_command_line(prog="python -m scheduler_svc.batch_runner")
    # The tokenizers' own thread pool gains nothing for single texts.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    configure_logs(settings.name, settings.log_format, settings.log_level)
    raise_descriptor_limit()
    asyncio.run(_run(settings))
    return 0


async def _run(settings: RunnerSettings) -> None:
    frontend = Frontend(settings)
    thread = StoreThread(open_database(settings.batch_dir, settings.batch_database))
    runner = Runner(settings, frontend, thread)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, runner.stop)
    frontend.open()
    try:
        await runner.run()
    finally:
        frontend.close()
        thread.close()


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Without waiting for a tokenizer thread that may still be busy with a long text.
    os._exit(status)
