"""The public CURVE keys of the executors that may attach, kept up to date with their folder."""

from __future__ import annotations

import stat
import time
from collections.abc import Callable
from pathlib import Path

import structlog
import zmq.auth

from common.logs import Seldom

log = structlog.get_logger()

CHECK_S = 1.0
"""The folder is looked at this often at most, when an executor dials: a key that was taken out is refused so soon."""
KEY_CHARACTERS = 40
"""Of a CURVE key in Z85 (ZeroMQ RFC 26, RFC 32)."""

Looks = tuple[tuple[str, int, int, int], ...]


class ExecutorKeys:
    """Tells pyzmq's authenticator whose connection is let in, in the authenticator's thread: the core's loop never
    waits for the disk.

    A folder or a file in it that cannot be read leaves the keys as they were and is tried again at each look; each
    reason is logged once.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """`folder`: its files `*.key` hold one public key each, as `python -m common.curve` writes them."""
        self._folder, self._clock = folder, clock
        self._keys: frozenset[bytes] = frozenset()
        self._seen: Looks | None = None
        """What the folder looked like when it was last read well."""
        self._failure = ""
        """Why it could not be read at the last look; empty when it could."""
        self._strangers = Seldom()
        self._next_look = clock()
        self._refresh()

    def callback(self, _domain: str, key: bytes) -> bool:
        """Whether a client's public key, in Z85, is known. The name is pyzmq's; it must not raise."""
        self._refresh()
        if key not in self._keys:
            if self._strangers.happens():
                shown = key.decode("ascii", "replace")
                log.warning("executor turned away: its key is not known", key=shown, count=self._strangers.count)
            return False
        return True

    def _refresh(self) -> None:
        """Look at the folder, unless that was just done."""
        now = self._clock()
        if now < self._next_look:
            return
        self._next_look = now + CHECK_S
        try:
            looks = _looks(self._folder)
            if looks == self._seen:
                return
            keys = frozenset(_public_key(self._folder / name) for name, *_ in looks)
        except (OSError, ValueError) as error:
            if str(error) != self._failure:
                self._failure = str(error)
                log.error("executors' keys not read: those known before stay", error=str(error), known=len(self._keys))
            return
        self._keys, self._seen, self._failure = keys, looks, ""
        log.info("executors' keys read", keys=len(keys))


def _looks(folder: Path) -> Looks:
    """Name, time of change, size and inode of each file of a key. Raises OSError, ValueError for what is no file."""
    names = sorted(path.name for path in folder.iterdir() if path.suffix == ".key" and not path.name.startswith("."))
    looks = []
    for name in names:
        status = (folder / name).stat()
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{folder / name}: is no file")
        looks.append((name, status.st_mtime_ns, status.st_size, status.st_ino))
    return tuple(looks)


def _public_key(path: Path) -> bytes:
    """Raises OSError, and ValueError where there is none; the text does not show what the file holds."""
    try:
        key, _ = zmq.auth.load_certificate(path)
    except (ValueError, IndexError):
        key = b""
    if len(key) != KEY_CHARACTERS:
        raise ValueError(f"{path}: holds no public key of {KEY_CHARACTERS} characters")
    return key
