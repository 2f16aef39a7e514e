"""The codec at the sender: what cannot be carried is refused before it leaves, by its name."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from common.wire import (
    Abort,
    Ended,
    EndReason,
    Leaving,
    LogprobColumns,
    Message,
    NewSequence,
    Plan,
    PromptScores,
    Reset,
    Result,
    SamplingParams,
    Serving,
    Stats,
    Submit,
    SubmitCall,
    Tokens,
    WireError,
    decode,
    encode,
)
from common.wire.fields import Bool, Int
from tests.common.messages import MESSAGES, assert_same, card, example


@pytest.mark.parametrize("cls", MESSAGES, ids=lambda cls: cls.__name__)
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
        (SubmitCall(()), "SubmitCall.requests: is empty"),
        (SubmitCall((example(Submit), example(Submit))), "SubmitCall.requests: not of one call"),
        (
            SubmitCall((example(Submit), replace(example(Submit), first_stream=7, model="other"))),
            "SubmitCall.requests: not of one call",
        ),
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
