"""`make serve`: both services on this machine, until SIGINT or SIGTERM; an executor that dies is started again.

A second signal does not wait for what still runs. Logs lie in a temporary folder, and stay there when a service fails.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from types import FrameType

from deploy.local import LocalServices, Process, ServiceFailed

CURL = """try:   curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\
         -d '{{"messages": [{{"role": "user", "content": "Tell me a story."}}], "max_tokens": 100}}'"""


MAX_RESTARTS = 5
"""An executor that has died so often within `RESTARTS_S` is not started again."""
RESTARTS_S = 60.0


class Stop:
    """The first signal ends in order: leaving the `with` block stops the services. The second one hurries them."""

    def __init__(self, services: LocalServices) -> None:
        self._services, self._is_second = services, False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def _handle(self, _signal: int, _frame: FrameType | None) -> None:
        if self._is_second:
            self._services.hurry()
            return
        self._is_second = True
        raise SystemExit(0)


class Revival:
    """Starts an executor that has died again: the streams that it ran go on. Raises `ServiceFailed` for any other."""

    def __init__(self, services: LocalServices, start: Callable[[], Process]) -> None:
        self._services, self._start = services, start
        self._executor = start()
        self._died_at: deque[float] = deque(maxlen=MAX_RESTARTS)

    def check(self) -> None:
        if self._executor.popen.poll() is not None:
            now = time.monotonic()
            often = len(self._died_at) == MAX_RESTARTS and now - self._died_at[0] < RESTARTS_S
            self._died_at.append(now)
            if not often:
                status = self._executor.popen.returncode
                self._services.bury(self._executor)
                self._executor = self._start()
                tell(f"the executor ended with status {status}: started again")
        self._services.raise_if_ended()


tell = partial(print, flush=True)
"""On the console, also where that is a pipe."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="serve", description=__doc__)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--model", default="", help="model folder or GGUF file; default: the embedded model")
    options = parser.parse_args()
    flags = ["--model", options.model] if options.model else []
    with LocalServices(port=options.port) as services:
        Stop(services)
        try:
            services.start_scheduler()
            revival = Revival(services, lambda: services.start_executor(*flags, name="executor-0"))
            services.wait_ready(timeout_s=600, tell=tell)
            tell(f"ready: {services.url}")
            tell(CURL.format(url=services.url))
            tell(f"logs:  {services.folder}")
            while True:
                revival.check()
                time.sleep(0.2)
        except ServiceFailed as error:
            services.keep_folder = True
            print(f"error: {error}\nlogs:  {services.folder}", file=sys.stderr)
            return 1


if __name__ == "__main__":
    raise SystemExit(main())
