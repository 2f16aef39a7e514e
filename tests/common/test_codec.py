"""The codec: what is encoded comes back, and junk is always a `WireError`."""

from __future__ import annotations

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
    Constraint,
    Hello,
    Language,
    LogprobColumns,
    Message,
    Plan,
    Result,
    SamplingParams,
    Submit,
    WireError,
    decode,
    encode,
    hello_protocol,
)
from common.wire.codec import Part
from common.wire.fields import ListOf
from tests.common.messages import CLASSES, MESSAGES, assert_same, example, message_in_numpy, messages_of

names = [cls.__name__ for cls in MESSAGES]
quick = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
HUGE = [2**64 - 1, 2**63, -(2**63), 2**32, 2**31, -1, 0]
JUNK: list[Any] = [
    *HUGE, None, True, 1.5, float("nan"), float("inf"), "", "text", b"", b"abc", b"\0" * 400_000, [], [[]], [None] * 9,
    {}, {"a": 1}, {"a": {"b": []}}, {b"a": 1}, {"a": float("nan")}, msgpack.ExtType(5, b"x"), msgpack.Timestamp(1),
    "x" * 2_000_000, ["a"] * 70_000,
]  # fmt: skip


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


Step = tuple[int, str, bool]
"""Place and name of a field, and whether it is a list."""


def way_to(cls: type[Message], outer: type[Message], start: int) -> list[Step] | None:
    """The fields that lead from one message to a part, the shortest way first; `start`: place of its first field."""
    inner = [
        ((place, name, isinstance(field, ListOf)), part.cls)
        for place, (name, field) in enumerate(outer.wire_fields, start)
        if isinstance(part := getattr(field, "item", field), Part)
    ]
    for step, found in inner:
        if found is cls:
            return [step]
    for step, found in inner:
        further = way_to(cls, found, 0)
        if further is not None:
            return [step, *further]
    return None


def put(raw: list[Any], way: list[Step], part: list[Any]) -> list[Any]:
    """A message with another part in that place."""
    (place, _, listed), *further = way
    if further:
        within = raw[place][0] if listed else raw[place]
        part = put(within, further, part)
    return [*raw[:place], [part] if listed else part, *raw[place + 1 :]]


@pytest.mark.parametrize("cls", [c for c in CLASSES if c.kind < 0], ids=lambda cls: cls.__name__)
def test_a_junk_field_within_a_part_is_refused_by_its_path(cls: type[Message]) -> None:
    ways = [(outer, way) for outer in MESSAGES if (way := way_to(cls, outer, 1)) is not None]
    holder, way = min(ways, key=lambda found: len(found[1]))
    samples = {
        "PromptLogprobs": [0, 1, b"", b"", b""],
        "SeenBlocks": [1, 1, b"", b""],
        "SeenLane": [1, "e", "m", "attached", 8, 1, 64, 16, 99, 1, 2, ""],
        "SeenSequence": [1, "r", 0, "", 3],
        "SeenWaiting": [[1, "r", 0, "", 3], "seats", 0.5, 0, 0],
        "SequenceAccount": [0, "waiting", "seats", "", 1.0, {}, 0, 3, 0, 0, 0, 0],
    }
    part, raw = samples.get(cls.__name__), raw_fields(holder)
    if part is None:
        part = raw
        for place, _, listed in way:
            part = part[place][0] if listed else part[place]
    path = r"\.".join(rf"{name}\[0\]" if listed else name for _, name, listed in way)
    for at, (name, _) in enumerate(cls.wire_fields):
        broken = [*part[:at], None, *part[at + 1 :]]
        with pytest.raises(WireError, match=rf"^{holder.__name__}\.{path}\.{name}: expected"):
            decode(msgpack.packb(put(raw, way, broken)))


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


@pytest.mark.parametrize(
    ("constraint", "field"),
    [
        (Constraint(reasoning_end=5), "reasoning_end"),
        (Constraint(Language.REGEX, "a", reasoning_start=5), "reasoning_start"),
    ],
)
def test_reasoning_has_an_end_and_a_grammar_behind_it(constraint: Constraint, field: str) -> None:
    data = encode(Submit(0, 1, "r", "m", np.zeros(1, np.int32), SamplingParams(1, constraint=constraint)))
    with pytest.raises(WireError, match=rf"constraint\.{field}: "):
        decode(data)


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
