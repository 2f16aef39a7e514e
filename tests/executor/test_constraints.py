"""Constraints on the rows of an executor: masks, grammars that come late, and rows that are resumed."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tokenizers

from common.grammar import GrammarCompiler, GrammarError
from common.grammar.library import GrammarsUnavailable
from common.grammar.vocabulary import vocabulary_bytes
from common.wire import Constraint, FinishCode, Language, Plan, Result
from executor_svc.constraints import constraints
from executor_svc.constraints.grammars import Grammars
from executor_svc.constraints.row import words_of
from executor_svc.graphs import Eager
from executor_svc.runner import Runner
from tests.executor.plans import decode_plan, ids, new_sequence, prefill_plan
from tests.executor.stub_model import CARD, LIMITS, VOCABULARY, StubModel

LETTERS = 'abcdefghijklmnopqrstuvwxyz0123456789{}[]:, "-'
PIECES = ["<end>", *LETTERS, "ab", "bc", "12", '{"']
TOKENS = {piece: number for number, piece in enumerate(PIECES)}


def tokenizer_json() -> bytes:
    """Whole words of a vocabulary without merges, and an end that is special."""
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(TOKENS, unk_token="a"))
    made.add_special_tokens([tokenizers.AddedToken("<end>", special=True)])
    return made.to_str().encode()


BOUND_CARD = replace(CARD, tokenizer_files={"tokenizer.json": tokenizer_json()})
FREE = {"tokens": [9, 8, 7, 6], "temperature": 1.0, "seed": 3, "ignore_eos": True, "max_tokens": 30}


def regex(source: str, **more: Any) -> Constraint:
    return Constraint(Language.REGEX, source, **more)


def request(constraint: Constraint, **more: Any) -> dict[str, Any]:
    return {"tokens": [5, 6, 7], "temperature": 1.0, "seed": 4, "max_tokens": 30, "constraint": constraint} | more


class Bench:
    """Runs sequences, each in the slot of its number, as plans that the core would make."""

    def __init__(self, *, eager: bool = False) -> None:
        self.runner = Runner(StubModel(), BOUND_CARD, LIMITS, recorder=Eager() if eager else None)
        self.iteration = 0
        self.output: dict[int, list[int]] = {}
        self.prefilling: list[int] = []
        self.ends: dict[int, FinishCode] = {}

    def admit(self, *requests: dict[str, Any]) -> None:
        new = []
        for fields in requests:
            slot = len(self.output)
            self.output[slot] = []
            self.prefilling.append(slot)
            new.append(new_sequence(slot, blocks=list(range(slot * 12, slot * 12 + 12)), **fields))
        self.step(prefill_plan(self.iteration + 1, *new), self.prefilling)

    def step(self, plan: Plan | None = None, sampling: list[int] | None = None) -> None:
        self.iteration += 1
        decodes = [slot for slot in self.output if slot not in self.ends and slot not in self.prefilling]
        if plan is None:
            rows = self.prefilling
            sampling = [*decodes, *rows]
            prefills = {"prefills": np.array(rows, np.uint16), "prefill_lengths": np.ones(len(rows), np.int32)}
            plan = decode_plan(self.iteration, *decodes, **prefills)
        result = self.runner.run(plan)
        assert isinstance(result, Result), result
        self.prefilling = []
        for slot, token, code in zip(sampling or (), result.tokens.tolist(), result.finish.tolist(), strict=True):
            if code == FinishCode.NOT_READY:
                self.prefilling += [slot] * (not self.output[slot])
            else:
                self.output[slot] += [token] * (code != FinishCode.STUCK)
                if code:
                    self.ends[slot] = FinishCode(code)

    def run(self) -> None:
        while len(self.ends) < len(self.output):
            self.step()

    def text(self, slot: int) -> str:
        return "".join(PIECES[token] for token in self.output[slot] if token)


def run(*requests: dict[str, Any], eager: bool = False) -> Bench:
    bench = Bench(eager=eager)
    bench.admit(*requests)
    bench.run()
    return bench


@pytest.mark.parametrize("eager", [False, True], ids=["host", "device inputs"])
def test_a_grammar_is_kept_and_mates_are_as_alone(eager: bool) -> None:
    bound = [request(regex("[ab]{2}(1|2)*c"), seed=seed) for seed in range(3)]
    together = run(FREE, *bound, FREE | {"temperature": 0.0}, eager=eager)
    for slot in (1, 2, 3):
        assert re.fullmatch("[ab]{2}(1|2)*c", together.text(slot)) and together.ends[slot] is FinishCode.EOS
        assert run(bound[slot - 1]).output[0] == together.output[slot]
    assert run(FREE).output[0] == together.output[0]
    assert run(FREE | {"temperature": 0.0}).output[0] == together.output[4]


def test_a_row_waits_for_its_grammar_while_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraints, "IDLE_WAIT_S", 0.001)
    source = regex("[a-f]{3,9}")
    expected = run(request(source), FREE)
    late = Bench()
    promise = late.runner.constraints._grammars.get(source)
    gate = type(promise)()
    monkeypatch.setattr(Grammars, "get", lambda self, constraint: gate)
    late.admit(request(source), FREE)
    for _ in range(5):
        late.step()
    assert late.output[0] == [] and late.output[1] == expected.output[1][:6]
    gate.set_result(promise.result())
    late.run()
    assert late.output == expected.output


def test_a_resumed_row_goes_on_where_it_was() -> None:
    asked = request(regex("([a-f]|[0-9]){8,20}"), max_tokens=12)
    whole = run(asked).output[0]
    for count in (1, 5, 9):
        tokens = [*asked["tokens"], *whole[:count]]
        resumed = run(asked | {"tokens": tokens, "prompt_length": len(asked["tokens"])})
        assert resumed.output[0] == whole[count:]


THINK, THINK_END = VOCABULARY - 2, VOCABULARY - 1
"""Tokens without a text."""


def thinking(source: str, *, opened: bool, biases: tuple[float, float] = (0, 4), **more: Any) -> dict[str, Any]:
    """A grammar that begins behind the reasoning; the prompt has `opened` it, or the model has to.

    `biases`: of the tokens that begin and end it.
    """
    constraint = regex(source, reasoning_end=THINK_END, reasoning_start=-1 if opened else THINK)
    bias = {"bias_ids": ids(THINK, THINK_END), "bias_values": np.array(biases, np.float32)}
    return request(constraint, **bias, **more)


def split(output: list[int]) -> tuple[list[int], str]:
    """Reasoning and answer."""
    place = output.index(THINK_END)
    return output[:place], "".join(PIECES[token] for token in output[place + 1 :] if token)


@pytest.mark.parametrize("eager", [False, True], ids=["host", "device inputs"])
def test_a_grammar_begins_behind_the_reasoning(eager: bool) -> None:
    asked = [thinking("[ab]{3}c", opened=True, seed=seed, max_tokens=10) for seed in (0, 1, 9, 8)]
    bench = run(*asked, FREE, eager=eager)
    thoughts = []
    for slot in range(4):
        if bench.ends[slot] is FinishCode.LENGTH:
            assert THINK_END not in bench.output[slot] and 0 not in bench.output[slot]
            continue
        thought, answer = split(bench.output[slot])
        thoughts += thought
        assert re.fullmatch("[ab]{3}c", answer) and bench.ends[slot] is FinishCode.EOS
    # They are free, but that no end of the text is among them; some have no end, and some have.
    assert len(set(thoughts)) > 3 and 0 not in thoughts
    assert set(bench.ends.values()) == {FinishCode.EOS, FinishCode.LENGTH}
    assert bench.output[4] == run(FREE).output[0]


def test_the_first_token_tells_whether_there_is_reasoning() -> None:
    firsts = set()
    for seed in range(6):
        (first, *_) = output = run(thinking("[ab]{3}c", opened=False, biases=(4, 7), seed=seed)).output[0]
        firsts.add(first)
        assert re.fullmatch("[ab]{3}c", split(output)[1] if first == THINK else split([THINK_END, *output])[1])
    assert firsts <= {THINK, TOKENS["a"], TOKENS["b"], TOKENS["ab"]} and len(firsts) > 1 and THINK in firsts
    # The end alone is none: the grammar has no place for it.
    refused = run(thinking("[ab]{3}c", opened=False, biases=(-100, 4))).output[0]
    assert not {THINK, THINK_END} & set(refused)


@pytest.mark.parametrize("opened", [True, False])
def test_a_row_resumed_within_its_reasoning_or_behind_it(opened: bool) -> None:
    asked = thinking("([a-f]|[0-9]){9,20}", opened=opened, biases=(0, 4) if opened else (9, 7), seed=2, max_tokens=24)
    whole = run(asked).output[0]
    end = whole.index(THINK_END)
    assert end > 2 and len(whole) > end + 5 and (opened or whole[0] == THINK)
    for count in (1, end, end + 1, end + 4):
        tokens = [*asked["tokens"], *whole[:count]]
        resumed = run(asked | {"tokens": tokens, "prompt_length": len(asked["tokens"])})
        assert resumed.output[0] == whole[count:]


def test_reasoning_does_not_wait_for_the_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraints, "IDLE_WAIT_S", 0.001)
    asked = thinking("[a-f]{3,9}0", opened=True, seed=4)
    whole = run(asked).output[0]
    end = whole.index(THINK_END)
    late = Bench()
    promise = late.runner.constraints._grammars.get(asked["constraint"])
    gate = type(promise)()
    monkeypatch.setattr(Grammars, "get", lambda self, constraint: gate)
    late.admit(asked)
    for _ in range(end + 3):
        late.step()
    assert late.output[0] == whole[: end + 1]
    gate.set_result(promise.result())
    late.run()
    assert late.output[0] == whole
    monkeypatch.undo()
    monkeypatch.setattr("executor_svc.constraints.row.SLOW_S", -1.0)
    assert run(asked).output[0] == whole


def test_slow_steps_are_taken_in_threads_with_the_same_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = request(regex("[a-f]{3,9}0"))
    expected = run(asked, FREE).output
    monkeypatch.setattr("executor_svc.constraints.row.SLOW_S", -1.0)
    assert run(asked, FREE).output == expected
    monkeypatch.setattr("executor_svc.constraints.row.MAX_STEP_S", -1.0)
    stuck = run(asked, FREE)
    assert stuck.ends[0] is FinishCode.STUCK and stuck.output[1] == expected[1]


def test_masks_that_leave_nothing() -> None:
    a, b = TOKENS["a"], TOKENS["b"]
    assert run(request(Constraint(allowed_ids=ids(a, b)), max_tokens=9)).ends[0] is FinishCode.LENGTH
    assert set(run(request(Constraint(allowed_ids=ids(a, b)), max_tokens=9)).output[0]) == {a, b}
    assert run(request(regex("c+", allowed_ids=ids(a)))).ends[0] is FinishCode.STUCK
    # A grammar's end goes before min_tokens, and what it needs before bad words.
    assert run(request(regex("ab"), min_tokens=9)).text(0) == "ab"
    assert len(run(request(regex("(1|2)*"), min_tokens=9)).text(0)) >= 9
    needed = regex("c", bad_widths=np.array([1], np.uint16), bad_ids=ids(TOKENS["c"]))
    assert run(request(needed)).text(0) == "c"


def test_bad_words_do_not_come() -> None:
    a, b = TOKENS["a"], TOKENS["b"]
    runs = Constraint(allowed_ids=ids(a, b), bad_widths=np.array([2, 3], np.uint16), bad_ids=ids(a, a, b, b, b))
    output = run(request(runs, max_tokens=30)).output[0]
    assert set(output) == {a, b}
    text = "".join(PIECES[token] for token in output)
    assert "aa" not in text and "bbb" not in text


def test_logprobs_are_of_the_raw_distribution() -> None:
    free = run(request(Constraint(), ignore_eos=True, logprobs=VOCABULARY, max_tokens=1))
    result: list[Result] = []
    bench = Bench()
    inner = bench.runner.run
    bench.runner.run = lambda plan: result.append(inner(plan)) or result[-1]  # type: ignore[method-assign,func-returns-value]
    bench.admit(request(regex("z"), logprobs=VOCABULARY))
    bench.run()
    scored = next(item.logprobs for item in result if len(item.logprobs.rows))
    assert np.isfinite(scored.values).all() and len(scored.values) == VOCABULARY + 1
    assert bench.text(0) == "z" and len(free.output[0]) == 1


def test_grammars_are_kept_within_bounds() -> None:
    grammars = Grammars(BOUND_CARD, max_grammars=3)
    first = grammars.get(regex("a"))
    assert first.result().size_bytes > 0 and grammars.get(regex("a")) is first
    for number in range(5):
        grammars.get(regex(f"{number}")).result()
    assert len(grammars) == 3 and grammars.get(regex("a")) is not first
    with pytest.raises(GrammarError):
        grammars.get(regex("(")).result()
    with pytest.raises(GrammarsUnavailable):
        Grammars(CARD).get(regex("a")).result()


def test_a_grammar_that_does_not_compile_ends_its_row_alone() -> None:
    bench = run(request(regex("(")), FREE)
    assert bench.ends[0] is FinishCode.STUCK and bench.output[1] == run(FREE).output[0]


def test_words_hold_one_bit_a_token() -> None:
    words = words_of(np.array([0, 31, 33, 59]), VOCABULARY)
    assert words.view(np.uint32).tolist() == [1 | 1 << 31, 1 << 1 | 1 << 27]


def test_bytes_of_vocabularies() -> None:
    byte_level = tokenizers.Tokenizer(tokenizers.models.BPE({"Ġa": 0, "é": 1, "Ã©": 2, "<s>": 3, "日": 4}, []))
    byte_level.decoder = tokenizers.decoders.ByteLevel()
    byte_level.add_special_tokens(["<s>"])
    assert vocabulary_bytes(byte_level.to_str().encode(), 6) == [b" a", b"\xe9", "é".encode(), b"", "日".encode(), b""]
    pieces = {"▁a": 0, "<0x0A>": 1, "b": 2}
    fallback = tokenizers.Tokenizer(tokenizers.models.BPE(pieces, [], byte_fallback=True))
    decoders = tokenizers.decoders
    fallback.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    assert vocabulary_bytes(fallback.to_str().encode(), 3) == [b" a", b"\n", b"b"]


def test_json_without_endless_white_space() -> None:
    compiler = GrammarCompiler(tokenizer_json(), VOCABULARY, (0,))
    schema = json.dumps({"type": "array", "items": {"enum": [1]}, "minItems": 1, "maxItems": 1})

    def accepts(language: Language, text: str) -> bool:
        matcher = compiler.compile(language, schema).matcher()
        return all(matcher.accept(TOKENS[letter]) for letter in text) and matcher.accept(0)

    assert accepts(Language.JSON_SCHEMA, "[        1 ]")
    assert not accepts(Language.JSON_SCHEMA, "[         1]")
    assert accepts(Language.JSON_SCHEMA_COMPACT, "[1]") and not accepts(Language.JSON_SCHEMA_COMPACT, "[ 1]")
