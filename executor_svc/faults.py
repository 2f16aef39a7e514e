"""Errors of an executor that more than one module speaks of."""

from __future__ import annotations

from common.wire import Fault


class FatalError(Exception):
    """The device is beyond use: the fault is reported and the process must end."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault
