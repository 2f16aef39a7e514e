"""Where the lines of `gilir up` and of its processes go."""

from __future__ import annotations

import contextlib
import sys
import threading
from pathlib import Path
from typing import IO

COLOURS = (36, 33, 32, 35, 34, 31)
"""ANSI colours of the names, one process after the other."""


class Console:
    """`tell` writes our own lines to stdout; `write` those of a process, to stderr behind its name, or to its file.

    A line that nobody can take is dropped: a service must not stop because its log has no reader.
    """

    def __init__(self, names: list[str], folder: Path | None) -> None:
        """Raises OSError where the files in `folder` cannot be written."""
        width = max(map(len, names))
        coloured = sys.stderr.isatty()
        self._lock = threading.Lock()
        self._prefixes = {
            name: f"\033[{COLOURS[i % len(COLOURS)]}m{name:<{width}} |\033[0m " if coloured else f"{name:<{width}} | "
            for i, name in enumerate(names)
        }
        self.folder = folder
        self._files: dict[str, IO[str]] = {}
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._files = {name: (folder / f"{name}.log").open("a", buffering=1) for name in names}

    def write(self, name: str, line: str) -> None:
        file = self._files.get(name)
        with self._lock, contextlib.suppress(OSError, ValueError):
            print(line if file else self._prefixes[name] + line, file=file or sys.stderr, flush=True)

    def tell(self, line: str) -> None:
        with self._lock, contextlib.suppress(OSError, ValueError):
            print(line, flush=True)

    def error(self, line: str) -> None:
        with self._lock, contextlib.suppress(OSError, ValueError):
            print(f"error: {line}", file=sys.stderr, flush=True)
