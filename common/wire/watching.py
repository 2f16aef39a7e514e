"""Messages between a frontend and the core for the live page: what the newest iterations did. Kinds 28 and 38."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from common.wire.codec import Message, Part, message
from common.wire.executor import Int32s, UInt16s, no_ids, no_slots, same_length
from common.wire.fields import (
    BOOL,
    COUNT,
    F64,
    MAX_TOKENS,
    MESSAGE,
    NAME,
    TOKEN_IDS,
    U32,
    U64,
    Column,
    ListOf,
    MapOf,
    WireError,
)

UInt32s = NDArray[np.uint32]

MAX_ROWS = 64
"""Iterations in one answer: more would keep the core from its lanes for longer than a short iteration takes."""
MAX_BLOCKS_SEEN = 2048
"""Of one lane."""
NOBODY = (1 << 32) - 1
"""Stands for no sequence in `SeenBlocks`."""
_CELLS = {
    "num_decodes": ("decode_slots", "decode_sequences"),
    "num_prefills": ("prefill_slots", "prefill_sequences", "prefill_lengths"),
    "num_left": ("left_slots", "left_sequences", "left_how"),
}
"""Which columns of `Iterations` each of its counts cuts."""
_SLOT_COLUMN = Column("u2", MAX_TOKENS)
_SEQUENCE_COLUMN = Column("u4", MAX_TOKENS)
_COUNT_COLUMN = Column("u2", MAX_ROWS)


class Left(IntEnum):
    """How a sequence left its seat. 1 to 3 are those of `FinishCode`."""

    EOS = 1
    STOP_TOKEN = 2
    LENGTH = 3
    ENDED = 4
    """Aborted, over its time, or failed."""
    PREEMPTED = 5
    MOVED = 6
    """Its lane drains: it goes on elsewhere."""
    FAILED_OVER = 7
    """Its executor was lost: it goes on elsewhere."""


class BlockState(IntEnum):
    """What is in a KV block."""

    FREE = 0
    CACHED = 1
    """A reusable prefix that nobody holds."""
    HELD = 2
    SHARED = 3
    """Held more than once."""


@message(kind=28)
@dataclass(frozen=True, slots=True, eq=False)
class Watch(Message):
    """What has been since? Answered by one `Iterations` with the same number.

    The core notes iterations only while such questions come.
    """

    number: Annotated[int, U32]
    after: Annotated[int, U64]
    """The last iteration that the asker knows, by its number in the ring; 0: none."""
    status: Annotated[bool, BOOL] = False
    """Whether who waits and what the KV blocks hold is wanted, too."""


@message(kind=-30)
@dataclass(frozen=True, slots=True, eq=False)
class SeenSequence(Message):
    """A sequence that is named in iterations, or waits."""

    sequence: Annotated[int, U32]
    """The low 32 bits of its number in the order of arrival."""
    request_id: Annotated[str, NAME]
    index: Annotated[int, COUNT]
    """Which of its request's `n`."""
    tenant: Annotated[str, NAME]
    prompt_tokens: Annotated[int, COUNT]


@message(kind=-31)
@dataclass(frozen=True, slots=True, eq=False)
class SeenLane(Message):
    """A lane that is named in iterations, as it stands now."""

    epoch: Annotated[int, U64]
    name: Annotated[str, NAME]
    model: Annotated[str, NAME]
    state: Annotated[str, NAME]
    """As `ExecutorAccount.state`; `lost` or `gone` where it is attached no more."""
    seats: Annotated[int, COUNT]
    running: Annotated[int, COUNT]
    token_budget: Annotated[int, COUNT]
    block_size: Annotated[int, COUNT]
    blocks: Annotated[int, COUNT]
    blocks_referenced: Annotated[int, COUNT]
    blocks_cached: Annotated[int, COUNT]
    """Reusable prefixes that nobody holds; what is neither is free."""
    reason: Annotated[str, MESSAGE] = ""
    """Why it was lost."""


@message(kind=-32)
@dataclass(frozen=True, slots=True, eq=False)
class SeenWaiting(Message):
    """A sequence in the queue."""

    seen: Annotated[SeenSequence, Part(SeenSequence)]
    reason: Annotated[str, NAME]
    """What it waits for, a `WaitReason`."""
    waited_s: Annotated[float, F64]
    """In all, since its arrival."""
    generated_tokens: Annotated[int, COUNT]
    num_preemptions: Annotated[int, COUNT]


@message(kind=-34)
@dataclass(frozen=True, slots=True, eq=False)
class SeenBlocks(Message):
    """What the KV blocks of an attached lane hold: every `step`-th one, from block 0 on."""

    epoch: Annotated[int, U64]
    step: Annotated[int, COUNT]
    states: Annotated[NDArray[np.uint8], Column("u1", MAX_BLOCKS_SEEN)]
    """A `BlockState` for each."""
    sequences: Annotated[UInt32s, Column("u4", MAX_BLOCKS_SEEN)]
    """Who holds it, of a shared one any of those; `NOBODY` where none of them has a seat."""

    def check(self, path: str) -> None:
        same_length(path, states=self.states, sequences=self.sequences)


@message(kind=38)
@dataclass(frozen=True, slots=True, eq=False)
class Iterations(Message):
    """Iterations that were acknowledged or lost, in that order: `first`, `first + 1`, …; at most `MAX_ROWS`.

    The columns of `decodes`, `prefills` and `left` are those of the iterations laid end to end. Who left did so between
    the lane's iteration before and this one (preempted, moved, ended), or with this one (finished, failed over).
    """

    number: Annotated[int, U32]
    newest: Annotated[int, U64]
    """The ring's newest iteration; when it is above the last one here, there is more to ask for."""
    first: Annotated[int, U64]
    lanes: Annotated[tuple[SeenLane, ...], ListOf(Part(SeenLane), 256)] = ()
    """Those attached, and those gone that the ring still names."""
    sequences: Annotated[tuple[SeenSequence, ...], ListOf(Part(SeenSequence), 1 << 17)] = ()
    """Those that took a seat since `after`."""
    waiting: Annotated[tuple[SeenWaiting, ...], ListOf(Part(SeenWaiting), 256)] = ()
    """The first in line, where they were asked for."""
    num_waiting: Annotated[dict[str, int], MapOf(COUNT, 16)] = field(default_factory=dict)
    """How many wait in all, by reason, where that was asked for."""
    blocks: Annotated[tuple[SeenBlocks, ...], ListOf(Part(SeenBlocks), 256)] = ()
    """Of each lane that is attached, where that was asked for."""
    epochs: Annotated[NDArray[np.int64], Column("i8", MAX_ROWS)] = field(default_factory=lambda: np.empty(0, np.int64))
    iterations: Annotated[NDArray[np.int64], Column("i8", MAX_ROWS)] = field(
        default_factory=lambda: np.empty(0, np.int64)
    )
    planned_at: Annotated[NDArray[np.float64], Column("f8", MAX_ROWS)] = field(default_factory=lambda: np.empty(0))
    """Seconds on the core's monotonic clock."""
    seconds: Annotated[NDArray[np.float64], Column("f8", MAX_ROWS)] = field(default_factory=lambda: np.empty(0))
    """From the plan to the result, or to the loss."""
    lost: Annotated[NDArray[np.uint8], Column("u1", MAX_ROWS)] = field(default_factory=lambda: np.empty(0, np.uint8))
    """1: the executor was lost with it."""
    num_decodes: Annotated[UInt16s, _COUNT_COLUMN] = field(default_factory=no_slots)
    num_prefills: Annotated[UInt16s, _COUNT_COLUMN] = field(default_factory=no_slots)
    num_left: Annotated[UInt16s, _COUNT_COLUMN] = field(default_factory=no_slots)
    decode_slots: Annotated[UInt16s, _SLOT_COLUMN] = field(default_factory=no_slots)
    decode_sequences: Annotated[UInt32s, _SEQUENCE_COLUMN] = field(default_factory=lambda: np.empty(0, np.uint32))
    prefill_slots: Annotated[UInt16s, _SLOT_COLUMN] = field(default_factory=no_slots)
    prefill_sequences: Annotated[UInt32s, _SEQUENCE_COLUMN] = field(default_factory=lambda: np.empty(0, np.uint32))
    prefill_lengths: Annotated[Int32s, TOKEN_IDS] = field(default_factory=no_ids)
    left_slots: Annotated[UInt16s, _SLOT_COLUMN] = field(default_factory=no_slots)
    left_sequences: Annotated[UInt32s, _SEQUENCE_COLUMN] = field(default_factory=lambda: np.empty(0, np.uint32))
    left_how: Annotated[NDArray[np.uint8], Column("u1", MAX_TOKENS)] = field(
        default_factory=lambda: np.empty(0, np.uint8)
    )
    """A `Left` for each."""

    def check(self, path: str) -> None:
        same_length(
            path,
            epochs=self.epochs,
            iterations=self.iterations,
            planned_at=self.planned_at,
            seconds=self.seconds,
            lost=self.lost,
            num_decodes=self.num_decodes,
            num_prefills=self.num_prefills,
            num_left=self.num_left,
        )
        for counts, cells in _CELLS.items():
            columns = {name: getattr(self, name) for name in cells}
            same_length(path, **columns)
            if int(getattr(self, counts).sum(dtype=np.int64)) != len(columns[cells[0]]):
                raise WireError(f"{path}.{counts}: do not add up to the length of {', '.join(cells)}")
