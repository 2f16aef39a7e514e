"""Hypothesis strategies for every wire message, made from the field tables, with edge values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st

from common.wire import (
    PROTOCOL_VERSION,
    Constraint,
    ExecutorAccount,
    Hello,
    Iterations,
    Limits,
    LogprobColumns,
    Loss,
    Message,
    ModelAccount,
    ModelCard,
    NewSequence,
    Plan,
    PromptLogprobs,
    PromptScores,
    Result,
    Roster,
    SamplingParams,
    SeenBlocks,
    Serving,
    Stats,
    Submit,
    SubmitCall,
    Tokens,
)
from common.wire.codec import Part, _kinds
from common.wire.fields import Blob, Bool, Column, FieldType, Float, Int, ListOf, MapOf, Text

MESSAGES: list[type[Message]] = [_kinds[kind] for kind in sorted(_kinds)]
"""All that can be sent alone."""

Fields = dict[str, Any]


def parts_of(cls: type[Message]) -> set[type[Message]]:
    """A message class and all the parts inside it."""
    found = {cls}
    for _, field in cls.wire_fields:
        inner = getattr(field, "item", field)
        if isinstance(inner, Part):
            found |= parts_of(inner.cls)
    return found


CLASSES = sorted(set().union(*(parts_of(cls) for cls in MESSAGES)), key=lambda cls: cls.__name__)
"""All messages and parts of messages."""


def values_of(field: FieldType) -> st.SearchStrategy[Any]:
    """Values that a field may hold."""
    match field:
        case Int():
            edges = [field.low, field.high, min(max(0, field.low), field.high)]
            return st.sampled_from(edges) | st.integers(field.low, field.high)
        case Float():
            return st.sampled_from([0.0, -0.0, 1.0, 5e-324, 1.7e308]) | st.floats(allow_nan=False, allow_infinity=False)
        case Bool():
            return st.booleans()
        case Text():
            return st.sampled_from(["", "m", "é世\n\0👩‍👩‍👧", "x" * min(field.max_length, 300)])
        case Blob():
            return st.sampled_from([b"", b"\0", b"\xff" * field.max_length if field.max_length < 99 else b"x" * 99])
        case Column():
            return columns_of(field)
        case ListOf():
            return st.lists(values_of(field.item), max_size=3).map(tuple)
        case MapOf():
            return st.dictionaries(st.sampled_from(["", "k", "é世\0"]), values_of(field.value), max_size=3)
        case Part():
            return messages_of(field.cls)
        case _:
            raise AssertionError(f"no strategy for {field}")


def columns_of(field: Column) -> st.SearchStrategy[Any]:
    items: st.SearchStrategy[Any]
    if field.dtype.kind == "f":
        items = st.floats(width=32) | st.sampled_from([-np.inf, np.inf, np.nan, -9999.0])
    else:
        info = np.iinfo(field.dtype)
        items = st.sampled_from([int(info.min), int(info.max), 0]) | st.integers(int(info.min), int(info.max))
    return st.lists(items, max_size=6).map(lambda values: np.array(values, field.dtype))


def messages_of(cls: type[Message]) -> st.SearchStrategy[Any]:
    """Whole messages of a class, with what must hold between fields put right."""
    fields = st.fixed_dictionaries({name: values_of(field) for name, field in cls.wire_fields})
    repair = REPAIRS.get(cls, lambda values: values)
    return fields.map(lambda values: cls(**repair(values)))


def cut_alike(values: Fields, *names: str) -> Fields:
    count = min(len(values[name]) for name in names)
    return {**values, **{name: values[name][:count] for name in names}}


def _params(values: Fields) -> Fields:
    return cut_alike(values, "bias_ids", "bias_values")


def _constraint(values: Fields) -> Fields:
    widths = values["bad_widths"] % 3 + 1
    bounded = {**values, "bad_widths": widths, "bad_ids": np.resize(values["bad_ids"], int(widths.sum()))}
    if not (values["language"] and values["source"]):
        return {**bounded, "language": 0, "source": "", "reasoning_end": -1, "reasoning_start": -1}
    return bounded if values["reasoning_end"] >= 0 else {**bounded, "reasoning_start": -1}


def _entries(values: Fields) -> Fields:
    widths = values["widths"] % 3
    total = int(widths.sum())
    return {
        **values,
        "widths": widths,
        "token_ids": np.resize(values["token_ids"], total),
        "values": np.resize(values["values"], total),
    }


def _logprobs(values: Fields) -> Fields:
    return _entries(cut_alike(values, "rows", "widths"))


def _rows_within(values: Fields) -> Fields:
    count, logprobs = len(values["tokens"]), values["logprobs"]
    if not count:
        return {**values, "logprobs": LogprobColumns()}
    return {**values, "logprobs": dataclasses.replace(logprobs, rows=logprobs.rows % np.uint16(count))}


def _result(values: Fields) -> Fields:
    return _rows_within(cut_alike(values, "tokens", "finish"))


def _tokens(values: Fields) -> Fields:
    return _rows_within(cut_alike(values, "tokens", "streams"))


def _new_sequence(values: Fields) -> Fields:
    tokens = values["tokens"] if len(values["tokens"]) else np.array([7], np.int32)
    count = len(tokens)
    return {
        **values,
        "tokens": tokens,
        "computed": values["computed"] % count,
        "prompt_length": min(values["prompt_length"], count),
    }


def _plan(values: Fields) -> Fields:
    values = cut_alike(values, "prefills", "prefill_lengths")
    values = cut_alike(values, "appended_slots", "appended_blocks")
    values["prefill_lengths"] = np.maximum(values["prefill_lengths"], 1)
    for name in ("copies", "swap_outs", "swap_ins"):
        values[name] = values[name][: len(values[name]) // 2 * 2]
    return values


def _submit(values: Fields) -> Fields:
    prompt = values["prompt"] if len(values["prompt"]) else np.array([7], np.int32)
    first_stream = min(values["first_stream"], (1 << 32) - values["n"])
    return {**values, "prompt": prompt, "first_stream": first_stream}


def _submit_call(values: Fields) -> Fields:
    requests = values["requests"] or (example(Submit),)
    first, stream, alike = requests[0], min(requests[0].first_stream, 1 << 31), []
    for request in requests:
        own = {"model": first.model, "limits": first.limits, "first_stream": stream}
        alike.append(dataclasses.replace(request, **own))
        stream += request.n
    return {"requests": tuple(alike)}


ROW_COLUMNS = (
    "epochs", "iterations", "planned_at", "seconds", "lost", "num_decodes", "num_prefills", "num_left"
)  # fmt: skip
CELL_COLUMNS = {
    "num_decodes": ("decode_slots", "decode_sequences"),
    "num_prefills": ("prefill_slots", "prefill_sequences", "prefill_lengths"),
    "num_left": ("left_slots", "left_sequences", "left_how"),
}


def _iterations(values: Fields) -> Fields:
    values = cut_alike(values, *ROW_COLUMNS)
    for counts, columns in CELL_COLUMNS.items():
        values[counts] = values[counts] % np.uint16(3)
        total = int(values[counts].sum())
        values |= {name: np.resize(values[name], total).astype(values[name].dtype) for name in columns}
    return values


REPAIRS: dict[type[Message], Callable[[Fields], Fields]] = {
    Constraint: _constraint,
    SamplingParams: _params,
    LogprobColumns: _logprobs,
    PromptLogprobs: _entries,
    PromptScores: _entries,
    Result: _result,
    Tokens: _tokens,
    NewSequence: _new_sequence,
    Plan: _plan,
    Submit: _submit,
    SubmitCall: _submit_call,
    Iterations: _iterations,
    SeenBlocks: lambda values: cut_alike(values, "states", "sequences"),
    Serving: lambda values: cut_alike(values, "models", "kv_capacity"),
}


def assert_same(one: Any, two: Any) -> None:
    """Two values carry the same, down to the last column; does not rely on the codec."""
    if isinstance(one, Message):
        assert type(one) is type(two)
        for name, _ in one.wire_fields:
            assert_same(getattr(one, name), getattr(two, name))
    elif isinstance(one, np.ndarray):
        assert one.dtype == two.dtype and one.shape == two.shape and one.tobytes() == two.tobytes()
    elif isinstance(one, tuple):
        assert type(two) is tuple and len(one) == len(two)
        for a, b in zip(one, two, strict=True):
            assert_same(a, b)
    elif isinstance(one, dict):
        assert list(one) == list(two)
        for key in one:
            assert_same(one[key], two[key])
    else:
        assert type(one) is type(two) and one == two, (one, two)


def in_numpy(value: Any, field: FieldType) -> Any:
    """The same value as numpy scalars, wide columns and plain lists, as callers may have it at hand."""
    match field:
        case Int():
            return (np.uint64 if value > np.iinfo(np.int64).max else np.int64)(value)
        case Float():
            narrow = np.float32(value) if abs(value) < 3e38 else np.float64(value)
            return narrow if float(narrow) == value else np.float64(value)
        case Bool():
            return np.bool_(value)
        case Column():
            return value.astype(np.int64 if field.dtype.kind in "iu" else np.float64) if len(value) else []
        case ListOf():
            return [in_numpy(item, field.item) for item in value]
        case MapOf():
            return {key: in_numpy(item, field.value) for key, item in value.items()}
        case Part():
            return message_in_numpy(value)
        case _:
            return value


def message_in_numpy(message: Any) -> Any:
    changes = {name: in_numpy(getattr(message, name), field) for name, field in message.wire_fields}
    return dataclasses.replace(message, **changes)


def example(cls: type[Message]) -> Any:
    """A message of a class with as little in it as may be."""
    plain: dict[str, Any] = {"model": "m", "streams": [], "stream": 0}
    match cls.__name__:
        case "Hello":
            return Hello(PROTOCOL_VERSION, "e", b"i", "cpu", Limits(16, 8, 0, 4, 64), card())
        case "Submit":
            return Submit(5, 2, "r", "m", np.array([1, 2], np.int32), SamplingParams(4))
        case "SubmitCall":
            return SubmitCall((example(Submit), dataclasses.replace(example(Submit), first_stream=7)))
        case "Plan":
            new = NewSequence(0, 1, np.array([1, 2], np.int32), 2, 0, np.array([3], np.int32), SamplingParams(4))
            return Plan(1, 2, decodes=np.array([1], np.uint16), new=(new,))
        case "Serving":
            return Serving((card(),), (128,))
        case "Roster":
            executor = ExecutorAccount("e", 1, "m", b"f", "cpu", "attached", False, 4, 1, 8, 2, 9, *[0.5] * 6)
            return Roster(5, (executor,), (ModelAccount("m", True, ("e",), 0, 1, 128),), (Loss("f", "gone", 0.5),))
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
            case Blob():
                values[name] = b""
            case MapOf():
                values[name] = {}
            case _:
                values[name] = False
    return cls(**values)


def card(**changes: Any) -> ModelCard:
    return ModelCard(**{"name": "m", "fingerprint": b"f" * 16, "vocab_size": 9, "max_model_len": 64, "eos_ids": (1,),
                        "dtype": "float32", **changes})  # fmt: skip
