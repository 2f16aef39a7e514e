"""The codec: what is encoded comes back, and junk is always a `WireError`."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import tracemalloc
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.wire import (
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    Abort,
    Alive,
    Ended,
    EndReason,
    Hello,
    Leaving,
    Limits,
    LogprobColumns,
    Message,
    ModelCard,
    NewSequence,
    Plan,
    PromptScores,
    Reset,
    Result,
    SamplingParams,
    Serving,
    Stats,
    Submit,
    Tokens,
    WireError,
    decode,
    encode,
    hello_protocol,
)
from common.wire.codec import Part
from common.wire.fields import Bool, Column, Int, ListOf, Text
from tests.common.messages import CLASSES, MESSAGES, assert_same, message_in_numpy, messages_of

names = [cls.__name__ for cls in MESSAGES]
quick = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
HUGE = [2**64 - 1, 2**63, -(2**63), 2**32, 2**31, -1, 0]
JUNK: list[Any] = [
    *HUGE, None, True, 1.5, float("nan"), float("inf"), "", "text", b"", b"abc", b"\0" * 400_000, [], [[]], [None] * 9,
    {}, {"a": 1}, {"a": {"b": []}}, {b"a": 1}, {"a": float("nan")}, msgpack.ExtType(5, b"x"), msgpack.Timestamp(1),
    "x" * 2_000_000, ["a"] * 70_000,
]  # fmt: skip


def example(cls: type[Message]) -> Any:
    """A message of a class with as little in it as may be."""
    plain: dict[str, Any] = {"model": "m", "streams": [], "stream": 0}
    match cls.__name__:
        case "Hello":
            return Hello(PROTOCOL_VERSION, "e", b"i", "cpu", Limits(16, 8, 0, 4, 64), card())
        case "Submit":
            return Submit(5, 2, "r", "m", np.array([1, 2], np.int32), SamplingParams(4))
        case "Plan":
            new = NewSequence(0, 1, np.array([1, 2], np.int32), 2, 0, np.array([3], np.int32), SamplingParams(4))
            return Plan(1, 2, decodes=np.array([1], np.uint16), new=(new,))
        case "Serving":
            return Serving((card(),), (128,))
        case "Stats":
            return Stats(True, False, {"g": 1.0}, {"c": 2.0}, {"h": (1.0, 2.0)})
    values = {}
    for name, field in cls.wire_fields:
        match field:
            case Int():
                values[name] = field.high
            case Column() | ListOf():
                values[name] = np.empty(0, getattr(field, "dtype", None)) if isinstance(field, Column) else ()
            case Text():
                values[name] = plain.get(name, "t")
            case Part():
                values[name] = field.cls()
            case _:
                values[name] = False
    return cls(**values)


def card(**changes: Any) -> ModelCard:
    return ModelCard(**{"name": "m", "fingerprint": b"f" * 16, "vocab_size": 9, "max_model_len": 64, "eos_ids": (1,),
                        "dtype": "float32", **changes})  # fmt: skip


def raw_fields(cls: type[Message]) -> list[Any]:
    raw: list[Any] = msgpack.unpackb(encode(example(cls)))
    return raw


@pytest.mark.parametrize("cls", MESSAGES, ids=names)
def test_decode_gives_back_what_was_encoded(cls: type[Message]) -> None:
    @quick
    @given(messages_of(cls))
    def check(message: Message) -> None:
        back = decode(encode(message))
        assert_same(message, back)
        assert back == message and hash(back) == hash(message)
        assert encode(message_in_numpy(message)) == encode(message), "numpy scalars, lists and wide columns"

    check()


def test_every_class_of_a_message_differs_from_every_other() -> None:
    assert len({cls.kind for cls in CLASSES}) == len(CLASSES)
    assert Alive(1) != Abort(np.array([1], np.uint32)) and Alive(1) != Alive(2) and Alive(1) == Alive(1)


@pytest.mark.parametrize("cls", MESSAGES, ids=names)
def test_a_cut_message_is_refused(cls: type[Message]) -> None:
    data = encode(example(cls))
    for end in range(len(data)):
        with pytest.raises(WireError):
            decode(data[:end])
    with pytest.raises(WireError):
        decode(data + b"\0")


@pytest.mark.parametrize("cls", MESSAGES, ids=names)
def test_flipped_bits_give_a_message_or_a_wire_error(cls: type[Message]) -> None:
    data = bytearray(encode(example(cls)))
    for bit in range(8 * min(len(data), 400)):
        data[bit // 8] ^= 1 << bit % 8
        decodes_or_refuses(bytes(data))
        data[bit // 8] ^= 1 << bit % 8


def decodes_or_refuses(data: bytes) -> None:
    try:
        assert isinstance(decode(data), Message)
    except WireError as error:
        assert 0 < len(str(error)) < 1000


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes) -> None:
    decodes_or_refuses(data)


scalars = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5)
    | st.binary(max_size=8) | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=4))
)  # fmt: skip
trees = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.integers(-5, 300) | st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(MESSAGES), st.lists(trees, max_size=6), st.booleans())
def test_random_trees_are_refused(cls: type[Message], fields: list[Any], fitting: bool) -> None:
    if fitting:
        fields = [*fields, *raw_fields(cls)[1 + len(fields) :]]
    decodes_or_refuses(msgpack.packb([cls.kind, *fields]))


@pytest.mark.parametrize("cls", MESSAGES, ids=names)
def test_a_junk_field_is_refused_by_its_name(cls: type[Message]) -> None:
    raw = raw_fields(cls)
    refused = 0
    for place, (name, _) in enumerate(cls.wire_fields, start=1):
        for junk in JUNK:
            data = msgpack.packb([*raw[:place], junk, *raw[place + 1 :]])
            try:
                decode(data)
            except WireError as error:
                refused += 1
                assert str(error).startswith(cls.__name__) and name in str(error), str(error)
                assert len(str(error)) < 400
    assert refused >= 15 * len(cls.wire_fields)


@pytest.mark.parametrize("cls", [c for c in CLASSES if c.kind < 0], ids=lambda cls: cls.__name__)
def test_a_junk_field_within_a_part_is_refused_by_its_path(cls: type[Message]) -> None:
    holder, place, listed = next(
        (outer, i, isinstance(field, ListOf))
        for outer in MESSAGES
        for i, (_, field) in enumerate(outer.wire_fields, start=1)
        if isinstance(inner := getattr(field, "item", field), Part) and inner.cls is cls
    )
    samples = {
        "PromptLogprobs": [0, 1, b"", b"", b""],
        "SequenceAccount": [0, "waiting", "seats", "", 1.0, {}, 0, 3, 0, 0, 0, 0],
    }
    part = samples.get(cls.__name__)
    raw = raw_fields(holder)
    if part is None:
        part = raw[place][0] if listed else raw[place]
    for at, (name, _) in enumerate(cls.wire_fields):
        broken = [*part[:at], None, *part[at + 1 :]]
        data = msgpack.packb([*raw[:place], [broken] if listed else broken, *raw[place + 1 :]])
        outer_name = holder.wire_fields[place - 1][0]
        with pytest.raises(WireError, match=rf"^{holder.__name__}\.{outer_name}(\[0\])?\.{name}: expected"):
            decode(data)


@pytest.mark.parametrize("cls", MESSAGES, ids=names)
def test_a_wrong_number_of_fields_is_refused(cls: type[Message]) -> None:
    raw = raw_fields(cls)
    for wrong in (raw[:1], raw[:-1], [*raw, 0], [*raw, *raw]):
        with pytest.raises(WireError, match=f"^{cls.__name__}: expected an array of {len(cls.wire_fields)} fields"):
            decode(msgpack.packb(wrong))


@pytest.mark.parametrize("start", [0, -1, 99, 2**63, True, 1.0, "1", None, [1], {}])
def test_an_unknown_kind_is_refused(start: Any) -> None:
    with pytest.raises(WireError, match="kind"):
        decode(msgpack.packb([start, 1, 2]))


def test_parts_are_never_messages() -> None:
    for cls in CLASSES:
        if cls.kind < 0:
            with pytest.raises(WireError, match="unknown kind"):
                decode(msgpack.packb([cls.kind, *[0] * len(cls.wire_fields)]))


@pytest.mark.parametrize("junk", [b"", b"\x45", b"\xc1", b"\x90", b"\x80", b"\xdd\xff\xff\xff\xff", b"\xc7\x00"])
def test_short_junk_is_refused(junk: bytes) -> None:
    with pytest.raises(WireError):
        decode(junk)


def test_a_message_over_the_limit_is_refused_unread() -> None:
    with pytest.raises(WireError, match="over the limit"):
        decode(bytes(MAX_MESSAGE_BYTES + 1))


def bombs() -> dict[str, bytes]:
    count = 1 << 20
    array, mapping = b"\xdd" + count.to_bytes(4, "big"), b"\xdf" + count.to_bytes(4, "big")
    return {
        "claims": b"\xdd\xff\xff\xff\xff" * 800,
        "claims_within_size": array * 1000 + b"\0" * count,
        "maps": (mapping + b"\xa0") * 900 + b"\0" * count,
        "nested": b"\x91" * 100_000,
        "nested_maps": b"\x81\xa0" * 50_000,
        "long_text": b"\xdb\xff\xff\xff\xf0abc",
        "long_bytes": b"\x92\x0a\xc6\xff\xff\xff\xf0",
        "long_ext": b"\x92\x0a\xc9\xff\xff\xff\xf0\x05",
    }


@pytest.mark.parametrize("name", bombs())
def test_a_bomb_costs_no_more_memory_than_its_bytes(name: str) -> None:
    data = bombs()[name]
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            decode(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * len(data) + 2_000_000


def test_a_column_is_not_copied_many_times() -> None:
    data = encode(Submit(0, 1, "r", "m", np.zeros(1_000_000, np.int32), SamplingParams(1)))
    tracemalloc.start()
    try:
        message = decode(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert isinstance(message, Submit) and len(message.prompt) == 1_000_000
    assert peak < 4 * len(data)


@pytest.mark.parametrize("cls", MESSAGES, ids=names)
def test_what_cannot_be_carried_is_refused_by_its_name(cls: type[Message]) -> None:
    good = example(cls)
    for name, field in cls.wire_fields:
        wrong: list[Any] = [] if isinstance(field, Bool) else [object(), None]
        if isinstance(field, Int):
            wrong += [field.low - 1, field.high + 1, 1.0, "1"]
        for value in wrong:
            with pytest.raises(WireError, match=rf"^{cls.__name__}\.{name}: "):
                encode(dataclasses.replace(good, **{name: value}))


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (Ended(2**32, EndReason.EOS), "Ended.stream: "),
        (Ended(1, 77), "Ended.reason: "),
        (Leaving(1, "x" * 257), "Leaving.reason: .*256 characters"),
        (Leaving(1, "\ud800"), "Leaving.reason: .*surrogate"),
        (Abort(np.array([-1])), "Abort.streams: .*out of range"),
        (Abort(np.array([1.0])), "Abort.streams: .*not an integer"),
        (Abort(np.zeros((2, 2), np.uint32)), "Abort.streams: .*shape"),
        (Abort(np.zeros(70_000, np.uint32)), "Abort.streams: .*65535 items"),
        (
            Submit(0, 1, "r", "m", [1], SamplingParams(1, bias_values=["a"])),
            "Submit.params: bias_values: .*not numbers",
        ),
        (Submit(0, 1, "r", "m", [1], SamplingParams(1.5)), "Submit.params: max_tokens: "),
        (Stats(True, False, gauges={"g": float("inf")}), "Stats.gauges: expected a finite number"),
        (Stats(True, False, gauges={5: 1.0}), "Stats.gauges: expected text"),
        (Serving((card(tokenizer_files={"t": 7}),), (1,)), "Serving.models: tokenizer_files: expected bytes"),
    ],
)
def test_the_sender_learns_what_is_wrong(message: Message, text: str) -> None:
    with pytest.raises(WireError, match=text):
        encode(message)


def test_too_much_for_one_message_is_refused_by_the_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.wire.codec.MAX_MESSAGE_BYTES", 100)
    with pytest.raises(WireError, match=r"Submit: .* over the limit"):
        encode(Submit(0, 1, "r", "m", np.zeros(100, np.int32), SamplingParams(1)))


def test_a_text_for_people_is_cut_to_its_limit() -> None:
    """A long reason must not cost a client the message that carries it."""
    for text in ("x" * 10_000, "é" * 10_000, "bad \udcff path"):
        back = decode(encode(Ended(3, EndReason.FAILED, message=text)))
        assert isinstance(back, Ended) and 0 < len(back.message) <= 4096 and back.message[0] == text[0]
        assert isinstance(decode(encode(Reset(1, text))), Reset)


def test_long_names_of_model_and_executor_fit_a_metric() -> None:
    key = 'vllm:kv_cache_usage_perc{model_name="' + '\\"' * 256 + '",engine="' + "\\\\" * 256 + '"}'
    assert_same(decode(encode(Stats(True, False, {key: 1.0}))), Stats(True, False, {key: 1.0}))


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (Submit(0, 1, "r", "m", np.empty(0, np.int32), SamplingParams(1)), "Submit.prompt: is empty"),
        (Submit(2**32 - 1, 2, "r", "m", np.ones(1, np.int32), SamplingParams(1)), "Submit.first_stream"),
        (Tokens(np.ones(2, np.uint32), np.ones(1, np.int32)), "Tokens: .*streams 2, tokens 1"),
        (
            Tokens(np.ones(1, np.uint32), np.ones(1, np.int32), LogprobColumns([1], [1], [5], [-1.0])),
            "Tokens.logprobs.rows: beyond",
        ),
        (Result(1, 1, np.ones(2, np.int32), np.zeros(1, np.uint8)), "Result: .*tokens 2, finish 1"),
        (
            Result(1, 1, np.ones(1, np.int32), np.zeros(1, np.uint8), LogprobColumns([0], [2], [5], [-1.0])),
            "Result.logprobs.widths: do not add up",
        ),
        (PromptScores(1, 1, [3], [1, 2], [-1.0, -2.0]), "PromptScores.widths: do not add up"),
        (PromptScores(1, 1, [1], [1], [-1.0, -2.0]), "PromptScores: .*token_ids 1, values 2"),
        (Serving((card(),), (1, 2)), "Serving.kv_capacity: 2 of them for 1"),
        (Plan(1, 1, prefills=[1]), "Plan: .*prefills 1, prefill_lengths 0"),
        (Plan(1, 1, prefills=[1], prefill_lengths=[0]), "Plan.prefill_lengths: must be at least 1"),
        (Plan(1, 1, appended_slots=[1]), "Plan: .*appended_slots 1"),
        (Plan(1, 1, copies=[1]), "Plan.copies: expected pairs"),
        (
            Plan(1, 1, new=(NewSequence(0, 1, np.ones(2, np.int32), 2, 2, np.ones(1, np.int32), SamplingParams(1)),)),
            r"Plan.new\[0\]: computed",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused(message: Message, text: str) -> None:
    with pytest.raises(WireError, match=f"^{text}"):
        decode(encode(message))


def test_logprobs_of_minus_infinity_and_nan_are_carried() -> None:
    values = np.array([-np.inf, np.nan, -0.5], np.float32)
    logprobs = LogprobColumns([0], [3], [1, 2, 3], values)
    back = decode(encode(Result(1, 1, np.ones(1, np.int32), np.zeros(1, np.uint8), logprobs)))
    assert isinstance(back, Result) and back.logprobs.values.tobytes() == values.tobytes()


def test_a_prompt_of_a_million_tokens_and_the_largest_seeds() -> None:
    prompt = np.arange(1_000_000, dtype=np.int32)
    for seed in (0, 2**63 - 1, 2**63, 2**64 - 1):
        message = Submit(1, 1, "r", "m", prompt, SamplingParams(5, seed=seed))
        assert_same(decode(encode(message)), message)


def test_a_steady_plan_costs_two_bytes_a_row() -> None:
    for rows in (1, 8, 256, 4096):
        assert len(encode(Plan(2**40, 2**40, decodes=np.arange(rows, dtype=np.uint16)))) <= 64 + 2 * rows


def test_another_protocol_is_known_by_its_hello_alone() -> None:
    good = raw_fields(Hello)
    assert hello_protocol(msgpack.packb(good)) == PROTOCOL_VERSION
    later = msgpack.packb([Hello.kind, 9, "e", {"a": "field of later days"}])
    with pytest.raises(WireError):
        decode(later)
    assert hello_protocol(later) == 9
    for none in (b"", b"junk", msgpack.packb([Hello.kind]), msgpack.packb([Hello.kind, "9"]), encode(Alive(3))):
        assert hello_protocol(none) is None


def test_the_wire_needs_no_zeromq() -> None:
    code = "import sys, common.wire; bad = {'zmq', 'asyncio', 'torch', 'pydantic', 'structlog'} & set(sys.modules); "
    subprocess.run([sys.executable, "-c", code + "assert not bad, bad"], check=True)
