"""Messages between a frontend and the core. Kinds 20-29 come from the frontend, 30-39 from the core.

A *stream* is one sequence as its frontend knows it: a number that this frontend gave and never uses twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from common.wire.codec import Message, Part, message
from common.wire.executor import (
    Int32s,
    LogprobColumns,
    ModelCard,
    SamplingParams,
    UInt16s,
    check_entries,
    same_length,
)
from common.wire.fields import (
    BOOL,
    COUNT,
    F64,
    I32,
    MAX_TOKENS,
    MESSAGE,
    NAME,
    STREAMS,
    TOKEN_IDS,
    U32,
    U64,
    Blob,
    Column,
    Int,
    ListOf,
    MapOf,
    WireError,
)

UInt32s = NDArray[np.uint32]

MAX_SERIES = 2048
"""Characters in the name of a metric with its labels: two escaped `NAME`s and more."""


class EndReason(IntEnum):
    """Why a stream ended."""

    EOS = 1
    STOP_TOKEN = 2
    LENGTH = 3
    ABORTED = 4
    """The frontend or the supervisor asked for it."""
    REJECTED = 5
    """It can never be served (a client's mistake): HTTP 400."""
    QUEUE_FULL = 6
    """HTTP 429."""
    NO_EXECUTOR = 7
    """No executor came within the hold time: HTTP 503."""
    FAILED = 8
    """It failed on the executors: HTTP 500."""
    SHUTDOWN = 9
    """The service is stopping: HTTP 503."""
    TIMEOUT = 10
    """It was not done within the time that the request gave: HTTP 504."""
    OVER_LIMIT = 11
    """Its API key has used up what it may: HTTP 429."""
    STOP_STRING = 12
    """Its frontend found one. No `Ended` tells of it."""


class Retention(IntEnum):
    """What becomes of a request's KV blocks in the prefix cache when it has ended."""

    NORMAL = 0
    KEEP = 1
    """Evicted after all that are not kept."""
    DROP = 2
    """Never shared: they are free at once."""


@message(kind=20)
@dataclass(frozen=True, slots=True, eq=False)
class FrontendHello(Message):
    """A frontend process is up; whatever an earlier one under its name had running is aborted."""

    name: Annotated[str, NAME]


@message(kind=-11)
@dataclass(frozen=True, slots=True, eq=False)
class KeyLimits(Message):
    """What the API key of a request may use. 0: as much as there is."""

    key: Annotated[str, NAME] = ""
    """Its id, not the key itself; empty: nothing is counted."""
    max_concurrent: Annotated[int, COUNT] = 0
    """API calls at a time, whatever the number of their prompts and sequences."""
    tokens_per_minute: Annotated[int, COUNT] = 0
    """Prompt tokens and generated ones together."""
    call: Annotated[int, U32] = 0
    """The first stream of the API call, which may consist of several requests."""


@message(kind=21)
@dataclass(frozen=True, slots=True, eq=False)
class Submit(Message):
    """One request: `n` sequences over one prompt, as the streams `first_stream … first_stream + n - 1`.

    Sequence i is sampled with the seed `(params.seed + i) mod 2**64`.
    """

    first_stream: Annotated[int, U32]
    n: Annotated[int, Int(1, 128)]
    request_id: Annotated[str, NAME]
    model: Annotated[str, NAME]
    prompt: Annotated[Int32s, TOKEN_IDS]
    params: Annotated[SamplingParams, Part(SamplingParams)]
    priority: Annotated[int, I32] = 0
    """Lower runs earlier."""
    tenant: Annotated[str, NAME] = ""
    salt: Annotated[bytes, Blob(64)] = b""
    """Prefixes are shared only among requests with the same one."""
    retention: Annotated[int, Int(0, 2)] = 0
    """A `Retention`."""
    deadline_ms: Annotated[int, COUNT] = 0
    """From arrival: when the answer is wanted, for the `deadline` discipline; 0: the configured default."""
    timeout_ms: Annotated[int, COUNT] = 0
    """From arrival: when it ends with `TIMEOUT` if it is not over; 0: the configured default."""
    limits: Annotated[KeyLimits, Part(KeyLimits)] = field(default_factory=KeyLimits)

    def check(self, path: str) -> None:
        if not len(self.prompt):
            raise WireError(f"{path}.prompt: is empty")
        if self.first_stream + self.n > 1 << 32:
            raise WireError(f"{path}.first_stream: too large for n streams")

    @property
    def requests(self) -> tuple[Submit, ...]:
        """As of a call that consists of it alone."""
        return (self,)


@message(kind=25)
@dataclass(frozen=True, slots=True, eq=False)
class SubmitCall(Message):
    """An API call with several prompts, for one model under one key: accepted whole, or not at all.

    The streams of its requests follow one another.
    """

    requests: Annotated[tuple[Submit, ...], ListOf(Part(Submit), 1 << 16)]

    def check(self, path: str) -> None:
        if not self.requests:
            raise WireError(f"{path}.requests: is empty")
        first, limits = self.requests[0], self.requests[0].limits
        stream = first.first_stream
        for request in self.requests:
            alike = (request.model, request.limits.key, request.limits.call) == (first.model, limits.key, limits.call)
            if not alike or request.first_stream != stream:
                raise WireError(f"{path}.requests: not of one call")
            stream += request.n


@message(kind=22)
@dataclass(frozen=True, slots=True, eq=False)
class Abort(Message):
    """These streams are wanted no more. Unknown and ended ones are passed over. No `Ended` answers."""

    streams: Annotated[UInt32s, STREAMS]
    stopped: Annotated[bool, BOOL] = False
    """A stop string ended them: they have their whole answers."""


@message(kind=23)
@dataclass(frozen=True, slots=True, eq=False)
class Inquiry(Message):
    """What has become of a request? Answered by one `Account` with the same number."""

    number: Annotated[int, U32]
    request_id: Annotated[str, NAME]
    tenant: Annotated[str, NAME] = ""
    """Who asks, and is told of this tenant's requests alone; empty: of all."""


@message(kind=24)
@dataclass(frozen=True, slots=True, eq=False)
class FrontendAlive(Message):
    """The frontend's event loop turns. Sent each second; one that falls silent is ended and started anew."""

    num_streams: Annotated[int, COUNT]
    """Those that are open there."""
    kept_streams: Annotated[int, COUNT] = 0
    """Answers that are kept there for clients who resume them."""
    kept_bytes: Annotated[int, U64] = 0
    """What these take."""


@message(kind=30)
@dataclass(frozen=True, slots=True, eq=False)
class Tokens(Message):
    """What one iteration brought for this frontend's streams, one token a stream."""

    streams: Annotated[UInt32s, STREAMS]
    tokens: Annotated[Int32s, TOKEN_IDS]
    logprobs: Annotated[LogprobColumns, Part(LogprobColumns)] = field(default_factory=LogprobColumns)

    def check(self, path: str) -> None:
        same_length(path, streams=self.streams, tokens=self.tokens)
        if len(self.logprobs.rows) and int(self.logprobs.rows.max()) >= len(self.tokens):
            raise WireError(f"{path}.logprobs.rows: beyond the last token")


@message(kind=31)
@dataclass(frozen=True, slots=True, eq=False)
class PromptScores(Message):
    """Prompt logprobs of one stream; see `PromptLogprobs`."""

    stream: Annotated[int, U32]
    start: Annotated[int, COUNT]
    widths: Annotated[UInt16s, Column("u2", MAX_TOKENS)]
    token_ids: Annotated[Int32s, TOKEN_IDS]
    values: Annotated[NDArray[np.float32], Column("f4", MAX_TOKENS)]

    def check(self, path: str) -> None:
        check_entries(path, self.widths, self.token_ids, self.values)


@message(kind=-41)
@dataclass(frozen=True, slots=True, eq=False)
class SequenceTimes(Message):
    """How long the steps of an accepted sequence took; 0 for those that it never made."""

    queue_us: Annotated[int, U64] = 0
    """Microseconds from arrival to its first seat."""
    prefill_us: Annotated[int, U64] = 0
    """From there to its first token."""
    decode_us: Annotated[int, U64] = 0
    """From there to its end."""
    num_preemptions: Annotated[int, COUNT] = 0
    num_failovers: Annotated[int, COUNT] = 0
    """How often its executor was lost while it ran."""


@message(kind=32)
@dataclass(frozen=True, slots=True, eq=False)
class Ended(Message):
    """A stream is over. Comes after the `Tokens` that hold its last token."""

    stream: Annotated[int, U32]
    reason: Annotated[int, Int(1, 11)]
    """An `EndReason`."""
    cached_tokens: Annotated[int, COUNT] = 0
    """Prompt tokens that its first admission found in the prefix cache."""
    message: Annotated[str, MESSAGE] = ""
    retry_after_s: Annotated[int, COUNT] = 0
    times: Annotated[SequenceTimes, Part(SequenceTimes)] = field(default_factory=SequenceTimes)


@message(kind=33)
@dataclass(frozen=True, slots=True, eq=False)
class Serving(Message):
    """The models that can be asked for now. Sent to a new frontend, and to all when it changes."""

    models: Annotated[tuple[ModelCard, ...], ListOf(Part(ModelCard), 64)]
    kv_capacity: Annotated[tuple[int, ...], ListOf(U64, 64)]
    """For each model: tokens of KV in the largest lane's pool."""

    def check(self, path: str) -> None:
        if len(self.models) != len(self.kv_capacity):
            raise WireError(f"{path}.kv_capacity: {len(self.kv_capacity)} of them for {len(self.models)} models")


@message(kind=34)
@dataclass(frozen=True, slots=True, eq=False)
class Stats(Message):
    """The core's beat, a few times a second and on a change of readiness; `/health` and `/metrics` live from it."""

    ready: Annotated[bool, BOOL]
    stopping: Annotated[bool, BOOL]
    gauges: Annotated[dict[str, float], MapOf(F64, 1 << 15, MAX_SERIES)] = field(default_factory=dict)
    counters: Annotated[dict[str, float], MapOf(F64, 4096, MAX_SERIES)] = field(default_factory=dict)
    histograms: Annotated[dict[str, tuple[float, ...]], MapOf(ListOf(F64, 256), 2048, MAX_SERIES)] = field(
        default_factory=dict
    )
    """For each name: cumulative bucket counts in the order of the metric's bounds (the last is +Inf), then the sum."""


@message(kind=-7)
@dataclass(frozen=True, slots=True, eq=False)
class SequenceAccount(Message):
    """Where one live sequence stands."""

    index: Annotated[int, COUNT]
    """Which of the request's `n`."""
    state: Annotated[str, NAME]
    """`waiting` or `running`."""
    reason: Annotated[str, NAME]
    """Why it is not in an iteration now (a `WaitReason`); `none` when it is."""
    executor: Annotated[str, NAME]
    """Empty while it waits."""
    age_s: Annotated[float, F64]
    waited_s: Annotated[dict[str, float], MapOf(F64, 16)]
    """Seconds it has waited in all, by reason."""
    priority: Annotated[int, I32]
    """Its class, as lifted by ageing."""
    prompt_tokens: Annotated[int, COUNT]
    computed_tokens: Annotated[int, COUNT]
    """Tokens whose KV an executor holds now."""
    generated_tokens: Annotated[int, COUNT]
    cached_tokens: Annotated[int, COUNT]
    num_preemptions: Annotated[int, COUNT]


@message(kind=35)
@dataclass(frozen=True, slots=True, eq=False)
class Account(Message):
    """Answer to an `Inquiry`; without sequences when the request is not live."""

    number: Annotated[int, U32]
    model: Annotated[str, NAME]
    num_waiting: Annotated[int, COUNT]
    """Sequences that wait for the same model."""
    sequences: Annotated[tuple[SequenceAccount, ...], ListOf(Part(SequenceAccount), 4096)]
