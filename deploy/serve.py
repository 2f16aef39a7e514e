"""`make serve`: both services on this machine, until SIGINT or SIGTERM."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from functools import partial
from types import FrameType

from deploy.local import LocalServices, ServiceFailed

CURL = """try:   curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\
         -d '{{"messages": [{{"role": "user", "content": "Tell me a story."}}], "max_tokens": 100}}'"""


def handle_stop(_signal: int, _frame: FrameType | None) -> None:
    """End in order: leaving the `with` block stops the services, and no second signal disturbs that."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    raise SystemExit(0)


tell = partial(print, flush=True)
"""On the console, also where that is a pipe."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="serve", description=__doc__)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--model", default="", help="model folder or GGUF file; default: the embedded model")
    options = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle_stop)
    with LocalServices(port=options.port) as services:
        try:
            services.start_scheduler()
            services.start_executor(*(["--model", options.model] if options.model else []))
            services.wait_ready(timeout_s=600, tell=tell)
            tell(f"ready: {services.url}")
            tell(CURL.format(url=services.url))
            while True:
                services.raise_if_ended()
                time.sleep(0.5)
        except ServiceFailed as error:
            print(f"error: {error}", file=sys.stderr)
            return 1


if __name__ == "__main__":
    raise SystemExit(main())
