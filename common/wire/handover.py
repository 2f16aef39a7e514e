"""Messages of a hand-over: the KV of a sequence goes straight from one executor to another.

The core tells the source what may be read (`Lend`) and the target where to read it (`Fetch`); the target reads it from
the source (`ReadBlocks`, `BlocksRead`, on a socket of the executors' own) and tells the core (`Fetched`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from common.wire.codec import Message, message
from common.wire.fields import BLOCKS, BOOL, COUNT, NAME, U32, U64, Blob, Int

MAX_CHUNK_BYTES = 64 << 20
"""Most KV in one message. An executor whose blocks are larger takes no part in hand-overs."""
MAX_CHUNK_BLOCKS = 4096
SECRET_BYTES = 16
SECRET = Blob(SECRET_BYTES)
"""Made at random for each ticket: who knows it may read the ticket's blocks."""


@message(kind=-20)
@dataclass(frozen=True, slots=True, eq=False)
class TransferPoint(Message):
    """Where the KV blocks of an executor can be read, and what they are. Without an address it takes no part."""

    address: Annotated[str, NAME] = ""
    """tcp://HOST:PORT or ipc://PATH of its transfer socket."""
    key: Annotated[bytes, Blob(40)] = b""
    """The socket's public CURVE key in Z85; empty: no encryption."""
    place: Annotated[bytes, Blob(16)] = b""
    """Where the address means something: executors of one place reach each other. Empty: everywhere."""
    layout: Annotated[bytes, Blob(16)] = b""
    """128 bits over all that the bytes of a block depend on, beside model and weights."""
    block_bytes: Annotated[int, COUNT] = 0
    """Size of one block over all layers."""


@message(kind=7)
@dataclass(frozen=True, slots=True, eq=False)
class Fetched(Message):
    """The target's answer to a `Fetch`: it will not write the blocks any more."""

    epoch: Annotated[int, U64]
    ticket: Annotated[int, U64]
    done: Annotated[bool, BOOL]
    """Whether all blocks are there. If not, what they hold is undefined."""
    reason: Annotated[str, NAME] = ""
    """Why not."""
    busy_us: Annotated[int, U32] = 0
    """Microseconds that it took, without the wait behind other hand-overs."""


@message(kind=17)
@dataclass(frozen=True, slots=True, eq=False)
class Lend(Message):
    """To the source: who knows the secret may read these blocks, until `Recall` or the end of the epoch."""

    epoch: Annotated[int, U64]
    ticket: Annotated[int, U64]
    secret: Annotated[bytes, SECRET]
    blocks: Annotated[NDArray[np.int32], BLOCKS]


@message(kind=18)
@dataclass(frozen=True, slots=True, eq=False)
class Fetch(Message):
    """To the target: read the blocks of a ticket, in their order, into these. Answered by `Fetched`, always."""

    epoch: Annotated[int, U64]
    ticket: Annotated[int, U64]
    secret: Annotated[bytes, SECRET]
    address: Annotated[str, NAME]
    key: Annotated[bytes, Blob(40)]
    """See `TransferPoint`; both of the source."""
    blocks: Annotated[NDArray[np.int32], BLOCKS]
    timeout_ms: Annotated[int, Int(1, 3_600_000)]
    """The target gives up when it has taken so long, not counting the wait behind other hand-overs."""


@message(kind=19)
@dataclass(frozen=True, slots=True, eq=False)
class Recall(Message):
    """To the source: the ticket is over. To the target: give it up, and answer."""

    epoch: Annotated[int, U64]
    ticket: Annotated[int, U64]


@message(kind=60)
@dataclass(frozen=True, slots=True, eq=False)
class ReadBlocks(Message):
    """Target to source: the KV of `count` blocks of a ticket, from its `first` on."""

    secret: Annotated[bytes, SECRET]
    first: Annotated[int, COUNT]
    count: Annotated[int, Int(1, MAX_CHUNK_BLOCKS)]


@message(kind=61)
@dataclass(frozen=True, slots=True, eq=False)
class BlocksRead(Message):
    """Source to target: that KV, block after block."""

    secret: Annotated[bytes, SECRET]
    first: Annotated[int, COUNT]
    data: Annotated[bytes, Blob(MAX_CHUNK_BYTES)]
