"""The sampler: every row by its own parameters, checked against plain formulas row by row."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.wire import Limits, LogprobColumns, ModelCard
from executor_svc.batch import BatchState, Work
from executor_svc.constraints import Constraints
from executor_svc.inputs import host_columns
from executor_svc.sampler import NonFiniteError, Sampler
from executor_svc.seen_tokens import SeenTokens
from executor_svc.transfer import Transfer
from tests.executor.plans import decode_plan, ids, new_sequence, prefill_plan

VOCABULARY = 40
CARD = ModelCard("m", b"w" * 16, VOCABULARY, 32, (0, 1), "float32")
LIMITS = Limits(block_size=4, num_blocks=64, num_host_blocks=0, max_num_seqs=8, max_num_batched_tokens=256)


class Bench:
    """A batch state and its sampler, fed with given logits."""

    def __init__(self) -> None:
        self.state = BatchState(LIMITS, max_model_len=32, vocab_size=VOCABULARY, eos_ids=(0, 1))
        self.sampler = Sampler(self.state, torch.device("cpu"), Constraints(self.state, CARD))
        self.iteration = 0
        self.last_logprobs = LogprobColumns()

    def admit(self, *sequences: dict[str, Any]) -> Work:
        """Prefill sequences in slots 0, 1, …; keys: tokens and sampling parameters."""
        new = []
        for slot, fields in enumerate(sequences):
            values: dict[str, Any] = {"tokens": [5, 6, 7], "temperature": 0.0} | fields
            new.append(new_sequence(slot, blocks=list(range(slot * 8, slot * 8 + 8)), **values))
        self.iteration += 1
        return self.state.apply(prefill_plan(self.iteration, *new))

    def step(self, work: Work, logits: torch.Tensor) -> list[int]:
        columns = host_columns(self.state, work, Transfer(torch.device("cpu")))
        sampled = self.sampler.collect(self.sampler.draw(logits.clone(), work, columns))
        self.last_logprobs = sampled.logprobs
        self.state.advance(work, sampled.tokens)
        tokens: list[int] = sampled.tokens.tolist()
        return tokens

    def decode(self, logits: torch.Tensor, *slots: int) -> list[int]:
        self.iteration += 1
        return self.step(self.state.apply(decode_plan(self.iteration, *slots)), logits)


def peaks(*tokens: int) -> torch.Tensor:
    """Logits of one row a token, whose largest is at that token; 20 is the second."""
    logits = torch.zeros(len(tokens), VOCABULARY)
    logits[:, 20] = 4.0
    for row, token in enumerate(tokens):
        logits[row, token] = 5.0
    return logits


def first_token(logits: torch.Tensor, **fields: Any) -> int:
    bench = Bench()
    return bench.step(bench.admit(fields), logits)[0]


def test_greedy_takes_the_largest() -> None:
    assert first_token(peaks(9)) == 9


def test_bias_moves_a_row_and_no_other() -> None:
    bench = Bench()
    bias = {"bias_ids": ids(33, 9), "bias_values": np.array([100, -3], np.float32)}
    work = bench.admit({}, bias, {"bias_ids": ids(9), "bias_values": np.array([-100], np.float32)})
    assert bench.step(work, peaks(9, 9, 9)) == [9, 33, 20]


def test_min_tokens_mask_eos_and_stop_tokens() -> None:
    bench = Bench()
    work = bench.admit(
        {"min_tokens": 2},
        {"min_tokens": 1, "stop_token_ids": ids(9, 20)},
        {"min_tokens": 2, "ignore_eos": True},
        {},
        {"stop_token_ids": ids(9)},
    )
    assert bench.step(work, peaks(1, 9, 1, 20, 9)) == [20, 2, 1, 20, 9]
    # Slot 4 has stopped; slot 1 may stop from here on; slot 0 must have one more token.
    assert bench.decode(peaks(1, 9, 1, 1), 0, 1, 2, 3) == [20, 9, 1, 1]
    assert bench.decode(peaks(1, 1), 0, 2) == [1, 1]


def test_min_tokens_counts_a_resumed_sequence_s_output() -> None:
    assert first_token(peaks(1), tokens=[5, 6, 7, 8], prompt_length=2, min_tokens=2) == 1
    assert first_token(peaks(1), tokens=[5, 6, 7, 8], prompt_length=2, min_tokens=3) == 20


def plain_penalties(
    logits: torch.Tensor, prompt: list[int], output: list[int], params: dict[str, float]
) -> torch.Tensor:
    """The definition, token by token."""
    changed = logits.clone()
    for token in set(prompt) | set(output):
        factor = params["repetition_penalty"]
        value = changed[token]
        value = value / factor if value > 0 else value * factor
        if count := output.count(token):
            value = value - params["frequency_penalty"] * count - params["presence_penalty"]
        changed[token] = value
    return changed


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_penalties_equal_their_definition(data: st.DataObject) -> None:
    """Over several steps, with other rows beside, resumed sequences, and a slot that is used again."""
    token = st.integers(2, VOCABULARY - 1)
    bench = Bench()
    sequences = []
    for _ in range(data.draw(st.integers(1, 4))):
        tokens = data.draw(st.lists(token, min_size=1, max_size=12))
        prompt_length = data.draw(st.integers(1, len(tokens)))
        params = {
            "repetition_penalty": data.draw(st.sampled_from([1.0, 1.3, 2.0])),
            "frequency_penalty": data.draw(st.sampled_from([0.0, 0.7])),
            "presence_penalty": data.draw(st.sampled_from([0.0, 0.5, -0.5])),
        }
        sequences.append((tokens, prompt_length, params))
    logits = torch.from_numpy(np.random.default_rng(data.draw(st.integers(0, 99))).normal(size=(9, 4, VOCABULARY)))
    logits = (logits * 2).float()
    work = bench.admit(*({"tokens": t, "prompt_length": n, "ignore_eos": True, **params} for t, n, params in sequences))
    steps = data.draw(st.integers(1, 8))
    for step in range(steps):
        rows = logits[step, : len(sequences)]
        drawn = bench.step(work, rows) if step == 0 else bench.decode(rows, *range(len(sequences)))
        for row, (tokens, prompt_length, params) in enumerate(sequences):
            expected = plain_penalties(rows[row], tokens[:prompt_length], tokens[prompt_length:], params)
            assert drawn[row] == int(expected.argmax())
            tokens.append(drawn[row])
    # The same slot for another sequence: nothing of the first is left.
    plan = prefill_plan(
        steps + 1,
        new_sequence(0, [30, 31], [0], generation=2, temperature=0.0, repetition_penalty=1.5),
        freed=np.array([0], np.uint16),
    )
    drawn = bench.step(bench.state.apply(plan), logits[8, :1])
    assert drawn == [
        int(plain_penalties(logits[8, 0], [30, 31], [], {**sequences[0][2], "repetition_penalty": 1.5}).argmax())
    ]


def test_seen_tokens_are_kept_up_one_by_one() -> None:
    """A step of a long sequence must not look at all of it again."""
    bench = Bench()
    work = bench.admit({"tokens": [5, 5, 6], "repetition_penalty": 1.1})
    bench.step(work, peaks(9))
    seen = bench.sampler._seen
    seen._rebuild = None  # type: ignore[method-assign, assignment]
    assert bench.decode(peaks(9), 0) == [9]
    found = seen.occurrences(np.array([3]), np.array([0]))
    assert found.rows.tolist() == [3, 3, 3]
    assert found.token_ids.tolist() == [5, 6, 9]
    assert found.counts.tolist() == [0, 0, 2]
    assert found.in_prompt.tolist() == [True, True, False]


def test_seen_tokens_after_a_reset() -> None:
    bench = Bench()
    seen = SeenTokens(bench.state)
    bench.admit({"tokens": [5, 6]})
    seen.occurrences(np.array([0]), np.array([0]))
    bench.state.clear()
    seen.clear()
    bench.admit({"tokens": [8, 9]})
    assert seen.occurrences(np.array([0]), np.array([0])).token_ids.tolist() == [8, 9]


def test_logprobs_are_of_the_raw_logits() -> None:
    bench = Bench()
    bias = {"bias_ids": ids(33), "bias_values": np.array([100], np.float32)}
    work = bench.admit({"logprobs": 2, **bias}, {}, {"logprobs": 0, "temperature": 2.0, "seed": 3}, {"logprobs": 3})
    logits = peaks(9, 9, 9, 10)
    tokens = bench.step(work, logits)
    found = bench.last_logprobs
    expected = torch.log_softmax(logits, -1)
    assert found.rows.tolist() == [0, 2, 3] and found.widths.tolist() == [3, 1, 4]
    assert found.token_ids.tolist() == [33, 9, 20, tokens[2], 10, 10, 20, 0]
    rows = [0, 0, 0, 2, 3, 3, 3, 3]
    np.testing.assert_allclose(found.values, expected[rows, found.token_ids.astype(np.int64)], rtol=1e-6)
    found.check("logprobs")


def test_more_logprobs_than_tokens_in_the_vocabulary() -> None:
    bench = Bench()
    bench.step(bench.admit({"logprobs": 60_000}), peaks(9))
    assert bench.last_logprobs.widths.tolist() == [VOCABULARY + 1]


def test_prompt_logprobs() -> None:
    bench = Bench()
    prompt = list(range(2, 2 + 20)) * 1
    bench.admit({"tokens": prompt, "prompt_logprobs": 2})
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(19, VOCABULARY))).float()
    found = bench.sampler.score_prompt(logits, slot=0, start=1)()
    expected = torch.log_softmax(logits, -1)
    assert (found.start, found.widths.tolist()) == (1, [3] * 19)
    assert found.token_ids.reshape(19, 3)[:, 0].tolist() == prompt[1:]
    np.testing.assert_allclose(found.values.reshape(19, 3)[:, 0], expected[range(19), prompt[1:]], rtol=1e-5)
    np.testing.assert_array_equal(found.token_ids.reshape(19, 3)[:, 1:], expected.topk(2).indices)
    found.check("prompt")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_rows_that_are_not_finite_are_named(value: float) -> None:
    bench = Bench()
    work = bench.admit({}, {}, {"temperature": 1.0})
    logits = peaks(9, 9, 9)
    logits[0, 3] = -math.inf  # a banned token is no fault
    logits[1, 3] = value
    logits[2] = -math.inf
    with pytest.raises(NonFiniteError) as caught:
        bench.step(work, logits)
    assert caught.value.slots.tolist() == [1, 2]


def test_prompt_logits_that_are_not_finite_are_named() -> None:
    bench = Bench()
    bench.admit({"prompt_logprobs": 0})
    logits = torch.zeros(2, VOCABULARY)
    logits[1, 1] = math.nan
    with pytest.raises(NonFiniteError) as caught:
        bench.sampler.score_prompt(logits, slot=0, start=1)()
    assert caught.value.slots.tolist() == [0]


MIXED = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 5, "top_k": 10},
    {"temperature": 0.7, "seed": 2**64 - 1, "top_p": 0.8},
    {"temperature": 1.3, "seed": 2**63, "min_p": 0.05, "logprobs": 1},
    {"temperature": 0.0, "repetition_penalty": 2.0},
    {"temperature": 0.0, "bias_ids": ids(9), "bias_values": np.array([2], np.float32), "min_tokens": 8},
    {"temperature": 1.0, "seed": 5, "frequency_penalty": 0.5, "stop_token_ids": ids(7)},
    {"temperature": 1.0, "seed": 6, "presence_penalty": 0.5, "ignore_eos": True},
]


def test_a_row_draws_the_same_alone_and_among_others() -> None:
    """All kinds of parameters in one batch, in any order, against each alone."""
    generator = np.random.default_rng(7)
    logits = torch.from_numpy(generator.normal(size=(6, len(MIXED), VOCABULARY)) * 2).float()

    def run(order: list[int]) -> dict[int, list[int]]:
        bench = Bench()
        work = bench.admit(*(MIXED[kind] for kind in order))
        drawn: dict[int, list[int]] = {kind: [] for kind in order}
        alive = list(range(len(order)))
        for step in range(6):
            rows = logits[step, [order[slot] for slot in alive]]
            tokens = bench.step(work, rows) if step == 0 else bench.decode(rows, *alive)
            for slot, token in zip(alive, tokens, strict=True):
                drawn[order[slot]].append(token)
            alive = [slot for slot in alive if not bench.state.columns.finished[slot]]
        return drawn

    alone = {kind: run([kind])[kind] for kind in range(len(MIXED))}
    for _ in range(10):
        order = generator.permutation(len(MIXED)).tolist()
        assert run(order) == alone
    assert len({tuple(tokens) for tokens in alone.values()}) == len(MIXED)


def test_seeds_keyed_by_position_not_by_step() -> None:
    """A resumed sequence draws what it would have drawn."""
    logits = torch.from_numpy(np.random.default_rng(3).normal(size=(4, 1, VOCABULARY))).float()
    logits[:, 0, :2] = -math.inf
    params = {"temperature": 1.5, "seed": 11}
    bench = Bench()
    tokens = bench.step(bench.admit(params), logits[0])
    tokens += [bench.decode(logits[step], 0)[0] for step in (1, 2, 3)]
    resumed = first_token(logits[3], tokens=[5, 6, 7, *tokens[:3]], prompt_length=3, **params)
    assert resumed == tokens[3]
