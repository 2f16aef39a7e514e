"""structlog set-up of both services: one line an event, for people or as JSON. Prompts and outputs are never logged."""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import Any

import structlog

COMPILING = "compiling the native CPU step: once, up to a minute"
"""The event of an executor's log that is shown on the console where the others are not."""
_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
_processors: list[Any] = []
"""One list for good: loggers that have written keep it, and follow a later set-up so."""


def configure_logs(service: str, log_format: str = "console", log_level: str = "info") -> None:
    """Set structlog and the standard library's logging to write to stderr in one shape.

    `service` stands on every line. Bind a request with `structlog.contextvars.bind_contextvars(request_id=…)`.
    """
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        lambda _logger, _name, event: {"service": service, **event},
    ]
    if log_format == "json":
        last: list[Any] = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        # Plain tracebacks: a richer one shows local variables, and those hold prompts.
        plain = structlog.dev.plain_traceback
        last = [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain)]
    _processors[:] = [*shared, *last]
    structlog.configure(
        processors=_processors,
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[log_level]),
        logger_factory=_Stderr,
        cache_logger_on_first_use=True,
    )
    logging.raiseExceptions = False
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=[_drop_meta, *last]))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(_LEVELS[log_level], logging.WARNING))


class _Stderr:
    """Writes a line where `sys.stderr` points at that moment.

    A service outlives whoever reads its log: a line that cannot be written is dropped.
    """

    def __init__(self, *_arguments: Any) -> None:
        """structlog passes the positional arguments of `get_logger`; they say nothing here."""

    def msg(self, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # a closed pipe, a closed stream
            sys.stderr.write(line + "\n")
            sys.stderr.flush()

    debug = info = warning = error = critical = msg


def _drop_meta(_logger: Any, _name: str, event: Any) -> Any:
    event.pop("_record", None)
    event.pop("_from_structlog", None)
    return event


class Seldom:
    """Keeps a line that peers can cause at will from filling the disk: the first few are written, then one in many."""

    def __init__(self, first: int = 20, then: int = 1000) -> None:
        self._first, self._then = first, then
        self.count = 0
        """How often it happened."""

    def happens(self) -> bool:
        """It has happened once more: whether to write a line."""
        self.count += 1
        return self.count <= self._first or self.count % self._then == 0
