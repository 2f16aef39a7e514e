"""The files of a plan log, frame by frame."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgpack

from scheduler_svc.plan_log.format import (
    BLOCK_HEADER,
    MAGIC,
    MAX_BLOCK_BYTES,
    FormatError,
    Header,
    Kind,
    unpack_block,
)
from scheduler_svc.plan_log.writer import segment_files


class Frame(NamedTuple):
    """One frame, at the time that the core's clock showed."""

    kind: Kind
    now: float
    arguments: list[Any]


class Segment:
    """One file of a plan log."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_cut_bytes = 0
        """Bytes of a block at the end that is not whole; known when the frames have been read."""

    def frames(self) -> Iterator[Frame]:
        """All frames but `TIME`; the first is `HEADER`, with a `Header` for its argument.

        A block at the end that is not whole is passed over: a writer was killed, or is at work. Raises `FormatError`
        for a file that is no plan log or is damaged, OSError where it cannot be read.
        """
        try:
            yield from self._frames()
        except FormatError as error:
            raise FormatError(f"{self.path}: {error}") from error

    def _frames(self) -> Iterator[Frame]:
        now = 0.0
        first = True
        for kind, *arguments in self._raw_frames():
            if first != (kind == Kind.HEADER):
                raise FormatError("is no plan log that this version can read")
            if first:
                header = Header.unpack(*arguments)
                first, now = False, header.clock
                yield Frame(Kind.HEADER, now, [header])
            elif kind == Kind.TIME:
                (now,) = arguments
            else:
                yield Frame(_kind(kind), now, arguments)

    def _raw_frames(self) -> Iterator[list[Any]]:
        with self.path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise FormatError("is no plan log")
            for block in self._blocks(file):
                for raw in _unpack(block):
                    if type(raw) is not list or not raw:
                        raise FormatError("is no plan log that this version can read")
                    yield raw

    def _blocks(self, file: IO[bytes]) -> Iterator[bytes]:
        while head := file.read(BLOCK_HEADER.size):
            if len(head) < BLOCK_HEADER.size:
                self.num_cut_bytes = len(head)
                return
            stored_size, size, checksum = BLOCK_HEADER.unpack(head)
            if not 0 < stored_size <= size <= MAX_BLOCK_BYTES:
                raise FormatError("a damaged block (its size is absurd)")
            stored = file.read(stored_size)
            if len(stored) < stored_size:
                self.num_cut_bytes = len(head) + len(stored)
                return
            yield unpack_block(stored, size, checksum)


def _unpack(block: bytes) -> Iterator[Any]:
    unpacker = msgpack.Unpacker(use_list=True, max_buffer_size=0)
    unpacker.feed(block)
    try:
        yield from unpacker
    except (ValueError, msgpack.UnpackException) as error:
        raise FormatError("is no plan log that this version can read") from error


def _kind(number: int) -> Kind:
    try:
        return Kind(number)
    except ValueError:
        raise FormatError(f"holds a frame of an unknown kind ({number})") from None


def segments(path: Path) -> list[Segment]:
    """The segment that a file is, or those in a folder, oldest first. Raises `FormatError` when there is none."""
    if path.is_dir():
        found = [Segment(file) for file in segment_files(path)]
        if not found:
            raise FormatError(f"{path}: holds no plan log")
        return found
    if not path.exists():
        raise FormatError(f"{path}: there is no such file or folder")
    return [Segment(path)]


def frames_of(read: list[Segment]) -> Iterator[Frame]:
    """The frames of some segments; one that has been deleted since it was listed is passed over."""
    for segment in read:
        with contextlib.suppress(FileNotFoundError):
            yield from segment.frames()
