"""The file format of the plan log: segments of compressed blocks of msgpack frames.

A segment file is the magic, then blocks. A block is its stored size, its size before compression and a CRC-32 of the
stored bytes (three little-endian uint32), then the bytes: zlib, or plain where that is no smaller. A block holds whole
frames, each a msgpack array `[kind, argument, …]`. The first frame of a segment is `HEADER`, the second `STATE`.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import asdict, dataclass, fields
from enum import IntEnum, StrEnum
from typing import Any

import msgpack

from common.wire import PROTOCOL_VERSION
from scheduler_svc.core import SchedulerConfig

MAGIC = b"gilirlog"
VERSION = 3
BLOCK_HEADER = struct.Struct("<III")
MAX_BLOCK_BYTES = 1 << 30
SUFFIX = ".planlog"


class Kind(IntEnum):
    """What a frame tells. Epochs are counted from the header's `first_epoch`."""

    HEADER = 0
    """version, map of the other fields of `Header`."""
    STATE = 1
    """The state of the core at the beginning of the segment (see `snapshot`); nil: nothing has happened yet."""
    TIME = 2
    """now, in seconds (float64) of the clock that the core was given; holds for the frames that follow."""
    RAISED = 3
    """type, text: the verb of the frame before ended with this exception."""
    CARD = 4
    """number, packed model card: comes before the first frame of a segment that names it."""
    ORDERS = 5
    """encoded messages: what executors were to be told, beside plans, of the verb of the frame before."""
    SUBMIT = 10
    """owner, encoded Submit or SubmitCall."""
    REFUSE = 11
    """owner, encoded Submit or SubmitCall, encoded Ended."""
    ABORT = 12
    """owner, streams."""
    ABORT_OWNER = 13
    """owner."""
    END_ALL = 14
    """reason, message."""
    ATTACH = 15
    """name, number of the model card, packed limits, packed transfer point, whether it is a spare, whether paused."""
    DETACH = 16
    """epoch, guilty slots, reason."""
    LEAVE = 17
    """epoch."""
    PAUSE = 18
    """epoch."""
    RESUME = 19
    """epoch."""
    VACATE = 20
    """epoch."""
    EXPIRE = 21
    PLAN = 22
    """epoch, encoded Plan."""
    NO_PLAN = 23
    """epoch: a plan was asked for, and there was nothing to run."""
    APPLY = 24
    """epoch, then an encoded Result, or (where it has no logprobs) iteration, tokens (raw little-endian int32), finish
    codes (raw; nil: all zero), busy_us, device_us."""
    FETCHED = 25
    """epoch of the target, ticket, whether all is there, seconds that it took."""


VERBS = frozenset(kind for kind in Kind if kind >= Kind.SUBMIT)
QUIET = (Kind.EXPIRE, Kind.NO_PLAN)
"""Verbs that a service at rest goes on with."""


class FormatError(Exception):
    """A file that is no readable plan log; the text is for people."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a segment begins with."""

    config: SchedulerConfig
    first_epoch: int
    run: bytes
    """Random; the segments of one run of the scheduler service have it in common."""
    part: int
    """Place of the segment in its run, from 0."""
    wall_time: float
    """Seconds since 1970 when the clock of the frames showed `clock`."""
    clock: float

    def pack(self) -> tuple[Any, ...]:
        """The frame's arguments."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return VERSION, {**values, "config": asdict(self.config), "protocol": PROTOCOL_VERSION}

    @classmethod
    def unpack(cls, version: int, values: dict[str, Any]) -> Header:
        """Raises `FormatError` when another version wrote it."""
        if version != VERSION or values.pop("protocol", None) != PROTOCOL_VERSION:
            raise FormatError("was written by another version of Gilir")
        try:
            return cls(**{**values, "config": unpack_config(values["config"])})
        except (TypeError, KeyError) as error:
            raise FormatError(f"was written by another version of Gilir ({error})") from error


def unpack_config(values: dict[str, Any]) -> SchedulerConfig:
    """The configuration from its map; choices are texts there. Raises `FormatError` for an unknown or missing field."""
    known = {choice.name: choice for choice in fields(SchedulerConfig)}
    if values.keys() != known.keys():
        names = ", ".join(sorted(values.keys() ^ known.keys()))
        raise FormatError(f"was written by another version of Gilir (settings that differ: {names})")
    typed = dict(values)
    for name, choice in known.items():
        if isinstance(choice.default, StrEnum):
            try:
                typed[name] = type(choice.default)(values[name])
            except ValueError as error:
                raise FormatError(f"was written by another version of Gilir ({error})") from error
    return SchedulerConfig(**typed)


def pack_block(frames: bytes) -> bytes:
    """One block of these frames, with its header."""
    stored = zlib.compress(frames, 1)
    if len(stored) >= len(frames):
        stored = frames
    return BLOCK_HEADER.pack(len(stored), len(frames), zlib.crc32(stored)) + stored


def unpack_block(stored: bytes, size: int, checksum: int) -> bytes:
    """The frames of a block. Raises `FormatError` when it is damaged."""
    if zlib.crc32(stored) != checksum:
        raise FormatError("a damaged block (its checksum is wrong)")
    if len(stored) == size:
        return stored
    try:
        frames = zlib.decompress(stored)
    except zlib.error as error:
        raise FormatError(f"a damaged block ({error})") from error
    if len(frames) != size:
        raise FormatError("a damaged block (its size is wrong)")
    return frames


def pack_frame(*items: Any) -> bytes:
    data: bytes = msgpack.packb(items, use_bin_type=True)
    return data
