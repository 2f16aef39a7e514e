"""Graphs of iterations with prefill, replayed on the CPU, against the same plans step by step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.wire import Limits, NewSequence, Plan
from executor_svc.graphs import Eager, mixed_sizes
from executor_svc.inputs import Model
from executor_svc.model import Decoder, load_model
from executor_svc.runner import Runner
from executor_svc.warm_up import warm_up, warm_up_graphs
from tests.executor.mini_server import run
from tests.executor.plans import decode_plan, ids, new_sequence, prefill_plan, slots
from tests.executor.replay import ReplayByCall
from tests.executor.stub_model import CARD, StubModel
from tests.executor.tiny_models import make_model, save_model

LIMITS = Limits(block_size=4, num_blocks=96, num_host_blocks=0, max_num_seqs=8, max_num_batched_tokens=200)
SIZES = [(32, 2), (32, 8), (64, 2), (64, 8), (96, 2), (96, 8), (128, 2), (128, 8)]


@pytest.fixture(autouse=True)
def _sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("executor_svc.graphs.FEW_ROWS", 2)
    monkeypatch.setattr("executor_svc.graphs.MAX_GRAPH_TOKENS", 128)


def sequence(slot: int, length: int, generation: int = 1, **params: Any) -> NewSequence:
    """A prompt in the slot's own 12 blocks."""
    tokens = np.random.default_rng(slot + 10 * generation).integers(4, 60, length).tolist()
    values = {"temperature": 0.0, "ignore_eos": True, "logprobs": 2} | params
    blocks = list(range(12 * slot, 12 * slot + 12))
    return new_sequence(slot, tokens, blocks, generation=generation, **values)


def work(iteration: int, *prefills: tuple[int, int], decodes: tuple[int, ...] = (), **fields: Any) -> Plan:
    """prefills: slots and lengths of their chunks."""
    chunks = {"prefills": slots(*(s for s, _ in prefills)), "prefill_lengths": ids(*(length for _, length in prefills))}
    return Plan(1, iteration, decodes=slots(*decodes), **chunks, **fields)


DRAWN = {"temperature": 0.9, "seed": 5, "top_k": 40}
PLANS: list[tuple[Plan, tuple[int, int] | int]] = [
    (work(1, (0, 33), new=(sequence(0, 40),)), (64, 2)),
    (work(2, (0, 7), (2, 3), (1, 5), new=(sequence(1, 5, **DRAWN), sequence(2, 9))), (32, 8)),
    (work(3, (2, 3), decodes=(1, 0)), (32, 8)),
    (work(4, (2, 3), decodes=(0, 1)), (32, 8)),
    (decode_plan(5, 0, 1, 2), 4),
    (work(6, (3, 1), decodes=(0,), new=(sequence(3, 1),), freed=slots(1)), (32, 2)),
    (work(7, (1, 45), (4, 44), (5, 30), decodes=(2,), new=tuple(sequence(s, 45, 2) for s in (1, 4, 5))), (128, 8)),
    (work(8, (4, 1), (5, 15), decodes=(1, 2), new=()), (32, 8)),
    (work(9, (6, 44), (7, 44), (3, 44), new=tuple(sequence(s, 44, 2) for s in (6, 7, 3)), freed=slots(3)), 0),
    (decode_plan(10, 6, 7, 3, 1, 2, 4, 5, 0), 8),
]
"""One long chunk; chunks of which a middle one ends no prompt; chunks beside decodes; decodes; a prompt of one token;
exactly the tokens of a graph less a few; more than the largest graph has. And the graph that each should take: (tokens,
rows), of decodes the rows, 0 for none."""


def poisoned(model: Model, recorder: Any, card: Any = CARD) -> Runner:
    """With NaN wherever nothing was written."""
    runner = Runner(model, card, LIMITS, recorder=recorder)
    for layer in (*runner.cache.k, *runner.cache.v):
        layer.fill_(float("nan"))
    return runner


def check(runner: Runner, graphs: ReplayByCall, plain: Runner) -> None:
    for number, (plan, size) in enumerate(PLANS):
        before = len(graphs.replayed), len(graphs.replayed_mixed)
        found, wanted = run(runner, plan), run(plain, plan)
        assert found.tokens.tolist() == wanted.tokens.tolist(), f"plan {number}"
        assert found.logprobs == wanted.logprobs, f"plan {number}: to the bit"
        taken = [*graphs.replayed[before[0] :], *graphs.replayed_mixed[before[1] :]]
        assert taken == ([size] if size else []), f"plan {number}"
    for one, other in zip((*runner.cache.k, *runner.cache.v), (*plain.cache.k, *plain.cache.v), strict=True):
        assert torch.equal(one.view(torch.int32), other.view(torch.int32)), "written where it should be, only there"


def test_any_mix_is_that_of_single_steps() -> None:
    graphs = ReplayByCall(StubModel())
    runner = poisoned(graphs.model, graphs)
    runner.capture()
    assert all(bool(layer.isnan().all()) for layer in (*runner.cache.k, *runner.cache.v))
    assert graphs.recorded_mixed == SIZES[::-1], "the largest first: the others live in its memory"
    check(runner, graphs, poisoned(StubModel(), Eager()))


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_bits_of_a_model(family: str, tmp_path: Path) -> None:
    """Batch-invariant. Of windows, sinks and experts too: padding tokens choose experts like any others."""
    loaded = load_model(str(save_model(make_model(family), tmp_path)), cpu_step="torch", batch_invariant=True)
    assert isinstance(loaded.decoder, Decoder)
    card = replace(loaded.card, max_model_len=48)
    graphs = ReplayByCall(loaded.decoder)
    runner = poisoned(graphs.model, graphs, card)
    runner.capture()
    check(runner, graphs, poisoned(loaded.decoder, Eager(), card))


def test_logprobs_of_a_prompt_run_step_by_step() -> None:
    graphs = ReplayByCall(StubModel())
    runner, plain = poisoned(graphs.model, graphs), poisoned(StubModel(), Eager())
    runner.capture()
    plan = prefill_plan(1, sequence(0, 20, prompt_logprobs=1), sequence(1, 3))
    assert run(runner, plan).prompt_logprobs == run(plain, plan).prompt_logprobs
    assert not graphs.replayed_mixed


def test_warm_up_runs_every_graph() -> None:
    graphs = ReplayByCall(StubModel())
    runner = Runner(graphs.model, CARD, LIMITS, recorder=graphs)
    warm_up(runner)
    assert not graphs.recorded_mixed
    assert warm_up_graphs(runner) == 4 + len(SIZES)
    # 48 positions hold no chunk of 64 tokens in one row and 32 more in another.
    assert set(graphs.replayed_mixed) == {size for size in SIZES if size[0] <= 46 * size[1]}


def test_a_model_that_cannot_be_recorded_runs_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of its graphs is used, not even those that were recorded before."""
    graphs = ReplayByCall(StubModel())
    record = graphs.record

    def refused(step: Any) -> Any:
        if len(graphs.recorded_mixed) == len(SIZES):
            raise RuntimeError("asks the host")
        return record(step)

    monkeypatch.setattr(graphs, "record", refused)
    runner = Runner(graphs.model, CARD, LIMITS, recorder=graphs)
    assert warm_up_graphs(runner) == 0
    assert not graphs.replayed_mixed


def test_sizes() -> None:
    assert mixed_sizes(LIMITS) == SIZES
    assert mixed_sizes(replace(LIMITS, max_num_batched_tokens=20, max_num_seqs=1)) == [(20, 1)]


def test_sizes_of_the_default_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    limits = Limits(16, 1000, 0, 64, 2048)
    tokens = [32, 64, 96, 128, 192, 256, 320, 384, 448, 512]
    assert mixed_sizes(limits) == [(count, min(count, 64)) for count in tokens]
    many = mixed_sizes(replace(limits, max_num_seqs=1000))
    assert many == sorted({(count, rows) for count in tokens for rows in (min(count, 64), count)})
    assert len(many) == 18
