"""Writes the segments of a plan log. The loop only gathers frames; a thread compresses and writes them."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Any, NamedTuple

import msgpack
import structlog

from scheduler_svc.plan_log.format import MAGIC, QUIET, SUFFIX, Header, Kind, pack_block

log = structlog.get_logger()

BLOCK_BYTES = 1 << 16
FLUSH_S, QUIET_FLUSH_S = 0.1, 10.0
"""How long frames wait for those that come after them; the longer time is that of a service at rest."""
MAX_BEHIND = 1024
"""Blocks that may wait for the disk; beyond that it does not keep up, and the log ends."""
_NAME = re.compile(r"segment-(\d{6,})" + re.escape(SUFFIX))


def segment_files(folder: Path) -> list[Path]:
    """The segments in a folder, oldest first."""
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


class _NewSegment(NamedTuple):
    first_block: bytes


class PlanLog:
    """Segments in a folder, which only their owner may read: they hold prompts and answers, as token ids.

    What the disk does never hurts the service: an error ends the log, with one line in the service's own log.
    """

    def __init__(self, folder: Path, *, segment_bytes: int = 64 << 20, max_segments: int = 8) -> None:
        """Raises OSError when the folder cannot be written."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.run = os.urandom(8)
        self.closed = False
        self._folder, self._segment_bytes, self._max_segments = folder, segment_bytes, max_segments
        self._packer = msgpack.Packer(use_bin_type=True)
        self._frames = bytearray()
        self._now: float | None = None
        self._sealed_at, self._wait_s = 0.0, QUIET_FLUSH_S
        self._part = 0
        self._written = 0
        """Bytes in the current segment."""
        self._full_bytes = segment_bytes
        """At which size the current segment is full; half of it at least is for what follows the state."""
        self._turning = False
        """A new segment has been asked for and is not open yet."""
        self._queue: SimpleQueue[bytes | _NewSegment | None] = SimpleQueue()
        self._file: IO[bytes] = self._open_next()
        self._delete_oldest()
        self._thread = threading.Thread(target=self._drain, name="plan-log", daemon=True)
        self._thread.start()

    # --- called by the loop ---

    @property
    def fullness(self) -> float:
        """How full the current segment is: from 1 on, another one should begin."""
        return 0.0 if self._turning or self.closed else self._written / self._full_bytes

    @property
    def part(self) -> int:
        """The place that the next segment of this run has."""
        return self._part

    def begin_segment(self, header: Header, state: bytes | None) -> None:
        """Begin a segment; all that follows goes into it. `state` is the core's, as `STATE` has it."""
        self.flush()
        self._now = None
        first = self._packer.pack((Kind.HEADER, *header.pack())) + self._packer.pack((Kind.STATE, state))
        # The first segment is open since the start.
        self._turning = self._part > 0
        self._put(_NewSegment(first) if self._turning else first)
        self._part += 1

    def write(self, now: float | None, *frame: Any) -> None:
        """Add a frame; `now` is the core's clock, None where the verb is not given it."""
        if self.closed:
            return
        if now is not None and now != self._now:
            self._now = now
            self._frames += self._packer.pack((Kind.TIME, now))
        self._frames += self._packer.pack(frame)
        if frame[0] not in QUIET:
            self._wait_s = FLUSH_S
        if len(self._frames) >= BLOCK_BYTES or (now is not None and not 0 <= now - self._sealed_at < self._wait_s):
            self.flush()

    def flush(self) -> None:
        """Hand what has gathered to the disk."""
        self._wait_s = QUIET_FLUSH_S
        self._sealed_at = self._now if self._now is not None else self._sealed_at
        if self._frames:
            block, self._frames = bytes(self._frames), bytearray()
            self._put(block)

    def close(self) -> None:
        """Write what is left; returns when it is written, or the disk has had five seconds."""
        if not self.closed:
            self.flush()
        self._queue.put(None)
        self._thread.join(5.0)
        self.closed = True

    def fail(self, reason: str) -> None:
        """End the log, with one line; called by either side."""
        if not self.closed:
            self.closed = True
            log.error("the plan log cannot be written and is closed", error=reason)

    def _put(self, item: bytes | _NewSegment) -> None:
        if self.closed:
            return
        if self._queue.qsize() >= MAX_BEHIND:
            self.fail("the disk does not keep up")
            return
        self._queue.put(item)

    # --- the thread ---

    def _drain(self) -> None:
        try:
            while (item := self._queue.get()) is not None:
                if isinstance(item, _NewSegment):
                    self._file.close()
                    self._file, self._written = self._open_next(), 0
                    self._write_block(item.first_block)
                    self._full_bytes = max(self._segment_bytes, self._written + self._segment_bytes // 2)
                    self._turning = False
                    self._delete_oldest()
                else:
                    self._write_block(item)
        except OSError as error:
            self.fail(str(error))
        finally:
            with contextlib.suppress(OSError):
                self._file.close()
            self._discard()

    def _write_block(self, frames: bytes) -> None:
        block = pack_block(frames)
        self._file.write(block)
        self._file.flush()
        self._written += len(block)

    def _open_next(self) -> IO[bytes]:
        """Create the segment after the newest one in the folder."""
        files = segment_files(self._folder)
        number = int(_NAME.fullmatch(files[-1].name)[1]) + 1 if files else 1  # type: ignore[index]
        path = self._folder / f"segment-{number:06}{SUFFIX}"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        file = os.fdopen(descriptor, "wb")
        file.write(MAGIC)
        file.flush()
        return file

    def _delete_oldest(self) -> None:
        for path in segment_files(self._folder)[: -self._max_segments]:
            path.unlink(missing_ok=True)

    def _discard(self) -> None:
        with contextlib.suppress(Empty):
            while True:
                self._queue.get_nowait()
