"""A file that exists while the executor is attached, for health checks that ask nobody."""

from __future__ import annotations

from pathlib import Path

import structlog

log = structlog.get_logger()


def show_status(file: Path | None, *, attached: bool) -> None:
    """None: none is wanted."""
    if file is None:
        return
    try:
        if attached:
            file.touch()
        else:
            file.unlink(missing_ok=True)
    except OSError as error:
        log.warning("cannot write the status file", file=str(file), error=error.strerror)
