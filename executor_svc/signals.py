"""How an executor process reacts to signals."""

from __future__ import annotations

import os
import signal

from executor_svc.link import Link


def install_signal_handlers(link: Link) -> None:
    """SIGTERM and SIGINT ask for a clean end; the second one ends the process at once. Main thread only."""

    def handle(number: int, _frame: object) -> None:
        if link.is_stopping:
            os._exit(128 + number)
        link.request_stop(signal.Signals(number).name)

    link.wake_at_signals()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)
