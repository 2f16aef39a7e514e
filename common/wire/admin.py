"""Messages between the admin process and the core. Kinds 40-49 come from the admin process, 50-59 from the core."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated

from common.wire.codec import Message, Part, message
from common.wire.fields import BOOL, COUNT, F64, MESSAGE, NAME, U32, U64, Blob, Int, ListOf

MAX_EXECUTORS = 1024


class Action(IntEnum):
    """What an operator wants of an executor, or of all executors of a model."""

    DRAIN = 1
    """Take no new sequence, hand over those that run, then stay attached, paused."""
    RELEASE = 2
    """As before, then go."""
    RESUME = 3
    """Take sequences again."""


class Verdict(IntEnum):
    """What became of a `Command`."""

    DONE = 1
    UNKNOWN = 2
    """There is no such executor or model: HTTP 404."""
    CONFLICT = 3
    """It is in no state for that: HTTP 409."""


@message(kind=40)
@dataclass(frozen=True, slots=True, eq=False)
class Survey(Message):
    """How do all executors and models stand? Answered by one `Roster` with the same number."""

    number: Annotated[int, U32]


@message(kind=41)
@dataclass(frozen=True, slots=True, eq=False)
class Command(Message):
    """Do this. Answered by one `Outcome` with the same number."""

    number: Annotated[int, U32]
    action: Annotated[int, Int(1, 3)]
    """An `Action`."""
    of_model: Annotated[bool, BOOL]
    """Whether `name` is a model's, and all its executors are meant."""
    name: Annotated[str, NAME]
    timeout_ms: Annotated[int, COUNT] = 0
    """Of a drain: what no other executor has room for until then goes back to the queue; 0: it runs to its end."""


@message(kind=42)
@dataclass(frozen=True, slots=True, eq=False)
class AdminAlive(Message):
    """The admin process's event loop turns. Sent each second; when it falls silent, it is ended and started anew."""

    num_pending: Annotated[int, COUNT]
    """Questions that await their answer there."""


@message(kind=50)
@dataclass(frozen=True, slots=True, eq=False)
class Outcome(Message):
    """Answer to a `Command`."""

    number: Annotated[int, U32]
    verdict: Annotated[int, Int(1, 3)]
    """A `Verdict`."""
    message: Annotated[str, MESSAGE] = ""


@message(kind=-8)
@dataclass(frozen=True, slots=True, eq=False)
class Loss(Message):
    """An executor was lost."""

    executor: Annotated[str, NAME]
    reason: Annotated[str, MESSAGE]
    ago_s: Annotated[float, F64]


@message(kind=-9)
@dataclass(frozen=True, slots=True, eq=False)
class ExecutorAccount(Message):
    """Where one attached executor stands."""

    name: Annotated[str, NAME]
    epoch: Annotated[int, U64]
    model: Annotated[str, NAME]
    fingerprint: Annotated[bytes, Blob(16)]
    device: Annotated[str, NAME]
    state: Annotated[str, NAME]
    """`attached`, `spare` (and standing by), `draining`, `paused` or `leaving`."""
    spare: Annotated[bool, BOOL]
    seats: Annotated[int, COUNT]
    running: Annotated[int, COUNT]
    kv_blocks: Annotated[int, COUNT]
    kv_blocks_used: Annotated[int, COUNT]
    iterations: Annotated[int, U64]
    """Planned in this epoch."""
    mean_iteration_s: Annotated[float, F64]
    """Smoothed; 0 before the first."""
    slowest_iteration_s: Annotated[float, F64]
    """Lately."""
    deadline_s: Annotated[float, F64]
    """How long the newest iteration may take; 0 before the first."""
    in_flight_s: Annotated[float, F64]
    """How long the iteration under way has been so; 0: there is none."""
    attached_s: Annotated[float, F64]
    silent_s: Annotated[float, F64]
    """Since the last sign of life."""


@message(kind=-10)
@dataclass(frozen=True, slots=True, eq=False)
class ModelAccount(Message):
    """Where one known model stands."""

    name: Annotated[str, NAME]
    offered: Annotated[bool, BOOL]
    """Whether requests for it are accepted."""
    executors: Annotated[tuple[str, ...], ListOf(NAME, MAX_EXECUTORS)]
    waiting: Annotated[int, COUNT]
    running: Annotated[int, COUNT]
    kv_tokens: Annotated[int, U64]
    """Tokens of KV in the largest pool of those that take requests."""


@message(kind=51)
@dataclass(frozen=True, slots=True, eq=False)
class Roster(Message):
    """Answer to a `Survey`."""

    number: Annotated[int, U32]
    executors: Annotated[tuple[ExecutorAccount, ...], ListOf(Part(ExecutorAccount), MAX_EXECUTORS)]
    models: Annotated[tuple[ModelAccount, ...], ListOf(Part(ModelAccount), 64)]
    losses: Annotated[tuple[Loss, ...], ListOf(Part(Loss), 256)]
    paused: Annotated[tuple[str, ...], ListOf(NAME, 1024)] = ()
    """Names that are paused and not attached: who comes under one is paused at once."""
    """The last of each name, also of names that are attached again."""
