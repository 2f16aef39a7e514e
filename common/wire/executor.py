"""Messages between the core and an executor. Kinds 1-9 come from the executor, 10-19 from the core."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from common.wire.codec import Message, Part, message, parse
from common.wire.constraint import UNBOUND, Constraint
from common.wire.fields import (
    BLOCKS,
    BOOL,
    COUNT,
    F64,
    I32,
    MAX_SLOTS,
    MAX_TOKENS,
    MESSAGE,
    NAME,
    SLOTS,
    TOKEN_IDS,
    U16,
    U32,
    U64,
    Blob,
    Column,
    Int,
    ListOf,
    MapOf,
    Text,
    WireError,
)
from common.wire.handover import TransferPoint

Int32s = NDArray[np.int32]
UInt16s = NDArray[np.uint16]


def no_ids() -> Int32s:
    return np.empty(0, np.int32)


def no_slots() -> UInt16s:
    return np.empty(0, np.uint16)


def same_length(path: str, **columns: NDArray[np.generic]) -> None:
    """Raise `WireError` unless all columns have one length."""
    if len({len(c) for c in columns.values()}) > 1:
        lengths = ", ".join(f"{name} {len(c)}" for name, c in columns.items())
        raise WireError(f"{path}: columns of different lengths: {lengths}")


def check_entries(path: str, widths: UInt16s, token_ids: Int32s, values: NDArray[np.float32]) -> None:
    """Raise `WireError` unless `widths` cut the entry columns exactly."""
    same_length(path, token_ids=token_ids, values=values)
    if int(widths.sum(dtype=np.int64)) != len(token_ids):
        raise WireError(f"{path}.widths: do not add up to the number of entries")


class FinishCode(IntEnum):
    """What the executor says of a row after an iteration."""

    CONTINUE = 0
    EOS = 1
    STOP_TOKEN = 2
    LENGTH = 3
    NOT_READY = 4
    """No token was drawn, as what bounds it is still being computed: the row's last token is to be planned again."""
    STUCK = 5
    """No token was drawn, as its constraint leaves none: the row cannot go on."""


@message(kind=-1)
@dataclass(frozen=True, slots=True, eq=False)
class SamplingParams(Message):
    """How one sequence is sampled and when it ends. `seed` keys the Philox draw together with the token position."""

    max_tokens: Annotated[int, COUNT]
    temperature: Annotated[float, F64] = 1.0
    top_p: Annotated[float, F64] = 1.0
    top_k: Annotated[int, COUNT] = 0
    min_p: Annotated[float, F64] = 0.0
    seed: Annotated[int, U64] = 0
    presence_penalty: Annotated[float, F64] = 0.0
    frequency_penalty: Annotated[float, F64] = 0.0
    repetition_penalty: Annotated[float, F64] = 1.0
    min_tokens: Annotated[int, COUNT] = 0
    ignore_eos: Annotated[bool, BOOL] = False
    stop_token_ids: Annotated[Int32s, Column("i4", 4096)] = field(default_factory=no_ids)
    bias_ids: Annotated[Int32s, TOKEN_IDS] = field(default_factory=no_ids)
    bias_values: Annotated[NDArray[np.float32], Column("f4", MAX_TOKENS)] = field(
        default_factory=lambda: np.empty(0, np.float32)
    )
    logprobs: Annotated[int, Int(-1, 65_535)] = -1
    """Alternatives wanted beside the sampled token's logprob; -1: none at all."""
    prompt_logprobs: Annotated[int, Int(-1, 65_535)] = -1
    constraint: Annotated[Constraint, Part(Constraint)] = field(default_factory=lambda: UNBOUND)

    def check(self, path: str) -> None:
        same_length(path, bias_ids=self.bias_ids, bias_values=self.bias_values)


@message(kind=-2)
@dataclass(frozen=True, slots=True, eq=False)
class Limits(Message):
    """What an executor can hold and run in one iteration."""

    block_size: Annotated[int, Int(1, 4096)]
    num_blocks: Annotated[int, Int(1, MAX_TOKENS)]
    num_host_blocks: Annotated[int, Int(0, MAX_TOKENS)]
    max_num_seqs: Annotated[int, Int(1, MAX_SLOTS)]
    max_num_batched_tokens: Annotated[int, Int(1, MAX_TOKENS)]


@message(kind=-3)
@dataclass(frozen=True, slots=True, eq=False)
class ModelCard(Message):
    """All that the scheduler service needs to know of a model; it never reads model files itself."""

    name: Annotated[str, NAME]
    fingerprint: Annotated[bytes, Blob(16)]
    """128 bits over config, precision and weights: executors with the same one are replicas."""
    vocab_size: Annotated[int, Int(1, MAX_TOKENS)]
    """Rows of the embedding: every token id below it may be sent."""
    max_model_len: Annotated[int, Int(1, MAX_TOKENS)]
    eos_ids: Annotated[tuple[int, ...], ListOf(I32, 256)]
    dtype: Annotated[str, NAME]
    chat_template: Annotated[str, Text(1 << 20)] = ""
    """Jinja source; empty: the model has none."""
    default_params: Annotated[dict[str, float], MapOf(F64, 16)] = field(default_factory=dict)
    """Sampling defaults of generation_config.json: temperature, top_p, top_k, min_p, repetition_penalty."""
    tokenizer_files: Annotated[dict[str, bytes], MapOf(Blob(128 << 20), 16)] = field(default_factory=dict)
    """tokenizer.json and tokenizer_config.json (and special_tokens_map.json where there is one)."""
    tool_chat_template: Annotated[str, Text(1 << 20)] = ""
    """Jinja source that takes the place of `chat_template` where there are tools; empty: the same for both."""


@message(kind=1)
@dataclass(frozen=True, slots=True, eq=False)
class Hello(Message):
    """An executor announces itself; the first message of every attachment."""

    protocol: Annotated[int, U32]
    name: Annotated[str, NAME]
    incarnation: Annotated[bytes, Blob(16)]
    """Random, new with every start of the process."""
    device: Annotated[str, NAME]
    limits: Annotated[Limits, Part(Limits)]
    model: Annotated[ModelCard, Part(ModelCard)]
    spare: Annotated[bool, BOOL] = False
    """It takes sequences only while no other executor of its model does."""
    transfer: Annotated[TransferPoint, Part(TransferPoint)] = field(default_factory=TransferPoint)


def hello_protocol(data: bytes) -> int | None:
    """The protocol that a `Hello` of any version speaks (its first field, for good); None when it is no Hello.

    So an executor whose Hello cannot be decoded can still be refused with the reason.
    """
    try:
        kind, *fields = parse(data)
    except WireError:
        return None
    return fields[0] if kind == Hello.kind and fields and type(fields[0]) is int else None


@message(kind=-4)
@dataclass(frozen=True, slots=True, eq=False)
class LogprobColumns(Message):
    """Logprobs of some rows of a result: entry lists laid end to end.

    `rows[i]` is an index into the message's tokens column and has `widths[i]` entries: first the sampled token, then
    the most likely ones in falling order. Values are natural logs of the raw model distribution (before temperature).
    """

    rows: Annotated[UInt16s, SLOTS] = field(default_factory=no_slots)
    widths: Annotated[UInt16s, SLOTS] = field(default_factory=no_slots)
    token_ids: Annotated[Int32s, TOKEN_IDS] = field(default_factory=no_ids)
    values: Annotated[NDArray[np.float32], Column("f4", MAX_TOKENS)] = field(
        default_factory=lambda: np.empty(0, np.float32)
    )

    def check(self, path: str) -> None:
        if not (len(self.rows) or len(self.widths) or len(self.token_ids) or len(self.values)):
            return
        same_length(path, rows=self.rows, widths=self.widths)
        check_entries(path, self.widths, self.token_ids, self.values)


@message(kind=-5)
@dataclass(frozen=True, slots=True, eq=False)
class PromptLogprobs(Message):
    """Logprobs of prompt positions `start … start + len(widths) - 1` of one sequence.

    Position p's entries are of the token at p given those before it (p >= 1): the prompt's token first, then the most
    likely ones in falling order.
    """

    slot: Annotated[int, U16]
    start: Annotated[int, COUNT]
    widths: Annotated[UInt16s, Column("u2", MAX_TOKENS)]
    token_ids: Annotated[Int32s, TOKEN_IDS]
    values: Annotated[NDArray[np.float32], Column("f4", MAX_TOKENS)]

    def check(self, path: str) -> None:
        check_entries(path, self.widths, self.token_ids, self.values)


@message(kind=2)
@dataclass(frozen=True, slots=True, eq=False)
class Result(Message):
    """Outcome of one plan.

    One token for each row that sampled: the plan's `decodes` in order, then those `prefills` whose chunk reached the
    end of the sequence's known tokens, in order.
    """

    epoch: Annotated[int, U64]
    iteration: Annotated[int, U64]
    tokens: Annotated[Int32s, TOKEN_IDS]
    finish: Annotated[NDArray[np.uint8], Column("u1", MAX_SLOTS)]
    """A `FinishCode` for each token; of a row without one (`NOT_READY`, `STUCK`) the token counts nothing."""
    logprobs: Annotated[LogprobColumns, Part(LogprobColumns)] = field(default_factory=LogprobColumns)
    prompt_logprobs: Annotated[tuple[PromptLogprobs, ...], ListOf(Part(PromptLogprobs), MAX_SLOTS)] = ()
    busy_us: Annotated[int, U32] = 0
    """Microseconds from the plan's arrival to this result's departure."""
    device_us: Annotated[int, U32] = 0
    """Of those, microseconds in the forward pass and the sampler."""

    def check(self, path: str) -> None:
        same_length(path, tokens=self.tokens, finish=self.finish)
        if len(self.logprobs.rows) and int(self.logprobs.rows.max()) >= len(self.tokens):
            raise WireError(f"{path}.logprobs.rows: beyond the last token")


@message(kind=3)
@dataclass(frozen=True, slots=True, eq=False)
class Fault(Message):
    """A plan could not be run. The epoch is over; `slots` names the guilty rows where the executor knows them."""

    epoch: Annotated[int, U64]
    iteration: Annotated[int, U64]
    slots: Annotated[UInt16s, SLOTS]
    reason: Annotated[str, NAME]
    message: Annotated[str, MESSAGE]


@message(kind=4)
@dataclass(frozen=True, slots=True, eq=False)
class Leaving(Message):
    """The executor wants to go: it is given no new sequence, and its own are moved."""

    epoch: Annotated[int, U64]
    reason: Annotated[str, NAME]


@message(kind=5)
@dataclass(frozen=True, slots=True, eq=False)
class Alive(Message):
    """Heartbeat of an executor process, sent beside the plans by a thread of its own; the core echoes it."""

    epoch: Annotated[int, U64]


@message(kind=10)
@dataclass(frozen=True, slots=True, eq=False)
class Welcome(Message):
    """The executor is attached under this epoch."""

    epoch: Annotated[int, U64]
    heartbeat_ms: Annotated[int, Int(1, 600_000)]


@message(kind=11)
@dataclass(frozen=True, slots=True, eq=False)
class Refused(Message):
    """The executor may not attach. `retry`: it may ask again later (the name is still taken, say)."""

    reason: Annotated[str, MESSAGE]
    retry: Annotated[bool, BOOL]


@message(kind=-6)
@dataclass(frozen=True, slots=True, eq=False)
class NewSequence(Message):
    """A sequence enters a slot, whole: first admission, and resumption after preemption or failover."""

    slot: Annotated[int, U16]
    generation: Annotated[int, U32]
    """Rises each time the slot is reused."""
    tokens: Annotated[Int32s, TOKEN_IDS]
    """All known tokens: the prompt and what was generated before."""
    prompt_length: Annotated[int, Int(1, MAX_TOKENS)]
    computed: Annotated[int, COUNT]
    """Tokens whose KV the given blocks hold already (a prefix hit)."""
    blocks: Annotated[Int32s, BLOCKS]
    params: Annotated[SamplingParams, Part(SamplingParams)]

    def check(self, path: str) -> None:
        if not self.computed < len(self.tokens) or self.prompt_length > len(self.tokens):
            raise WireError(f"{path}: computed and prompt_length must lie within the tokens")


@message(kind=12)
@dataclass(frozen=True, slots=True, eq=False)
class Plan(Message):
    """Membership and work of one iteration, as a change of what the executor already knows.

    Applied in this order: `freed`, `swap_outs`, `swap_ins`, `copies`, `new`, appended blocks; then the work. A row of
    `decodes` computes its last known token, the only one without KV; a row of `prefills` computes the next
    `prefill_lengths` positions. A slot that is neither freed nor named stays resident and does nothing.
    """

    epoch: Annotated[int, U64]
    iteration: Annotated[int, U64]
    decodes: Annotated[UInt16s, SLOTS] = field(default_factory=no_slots)
    prefills: Annotated[UInt16s, SLOTS] = field(default_factory=no_slots)
    prefill_lengths: Annotated[Int32s, Column("i4", MAX_SLOTS)] = field(default_factory=no_ids)
    new: Annotated[tuple[NewSequence, ...], ListOf(Part(NewSequence), MAX_SLOTS)] = ()
    freed: Annotated[UInt16s, SLOTS] = field(default_factory=no_slots)
    appended_slots: Annotated[UInt16s, Column("u2", MAX_TOKENS)] = field(default_factory=no_slots)
    appended_blocks: Annotated[Int32s, BLOCKS] = field(default_factory=no_ids)
    """`appended_blocks[i]` goes to the end of the block table of slot `appended_slots[i]`."""
    copies: Annotated[Int32s, BLOCKS] = field(default_factory=no_ids)
    """Pairs (from, to) of device blocks, flattened."""
    swap_outs: Annotated[Int32s, BLOCKS] = field(default_factory=no_ids)
    """Pairs (device block, host block), flattened."""
    swap_ins: Annotated[Int32s, BLOCKS] = field(default_factory=no_ids)
    """Pairs (host block, device block), flattened."""

    def check(self, path: str) -> None:
        same_length(path, prefills=self.prefills, prefill_lengths=self.prefill_lengths)
        same_length(path, appended_slots=self.appended_slots, appended_blocks=self.appended_blocks)
        for name in ("copies", "swap_outs", "swap_ins"):
            if len(getattr(self, name)) % 2:
                raise WireError(f"{path}.{name}: expected pairs")
        if len(self.prefill_lengths) and int(self.prefill_lengths.min()) < 1:
            raise WireError(f"{path}.prefill_lengths: must be at least 1")


@message(kind=13)
@dataclass(frozen=True, slots=True, eq=False)
class Reset(Message):
    """The epoch is over: forget every sequence and say Hello again."""

    epoch: Annotated[int, U64]
    reason: Annotated[str, MESSAGE]


@message(kind=14)
@dataclass(frozen=True, slots=True, eq=False)
class Drain(Message):
    """Nothing of this executor is needed any more: it may stop."""

    epoch: Annotated[int, U64]
