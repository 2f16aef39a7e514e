"""The batch state on the device and the graphs of decodes, on the CPU: graphs that replay by calling the step again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from common.wire import Limits, Plan
from executor_svc import stage
from executor_svc.device_inputs import DeviceInputs
from executor_svc.graphs import Eager, SharedResult, decode_sizes, mixed_sizes
from executor_svc.runner import Runner
from executor_svc.transfer import Transfer
from executor_svc.warm_up import warm_up, warm_up_graphs
from tests.executor.mini_server import Server, run
from tests.executor.plans import decode_plan, ids, new_sequence, prefill_plan, slots
from tests.executor.replay import ReplayByCall
from tests.executor.stub_model import CARD, LIMITS, REQUESTS, StubModel


def with_graphs(limits: Limits = LIMITS) -> tuple[Runner, ReplayByCall]:
    graphs = ReplayByCall(StubModel())
    runner = Runner(graphs.model, CARD, limits, recorder=graphs)
    assert runner.capture() == len(decode_sizes(limits)) + len(mixed_sizes(limits))
    return runner, graphs


def outputs(runner: Runner, chunk: int | None = None) -> dict[str, list[int]]:
    """All requests, one iteration apart; the first to end leaves its slot to another run of B."""
    server = Server(runner)
    for slot, name in enumerate(REQUESTS):
        server.step({slot: REQUESTS[name]}, chunk)
    while not server.ended:
        server.step()
    (first,) = server.ended
    names = list(REQUESTS)
    found = {names[first]: server.output[first]}
    server.free(first)
    server.step({first: REQUESTS["B"]})
    while len(server.ended) < len(REQUESTS):
        server.step()
    names[first] = "again"
    return found | {name: server.output[slot] for slot, name in enumerate(names)}


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    return outputs(Runner(StubModel(), CARD, LIMITS))


def test_tokens_are_those_of_the_host_s_inputs(expected: dict[str, list[int]]) -> None:
    """Mixed iterations, decodes of every number of rows, tables that grow, a slot that is used again."""
    runner, graphs = with_graphs()
    assert outputs(runner) == expected
    assert graphs.recorded == [8, 4, 2, 1], "the largest first: the others live in its memory"
    assert set(graphs.replayed) == {8, 4, 2, 1} and len(graphs.replayed) > 12


def test_without_graphs_too(expected: dict[str, list[int]]) -> None:
    assert outputs(Runner(StubModel(), CARD, LIMITS, recorder=Eager()), chunk=2) == expected


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the copies to the device, as they happen."""
    happened: list[str] = []
    for name in ("send", "fill"):
        copy = getattr(Transfer, name)

        def counted(*arguments: Any, _copy: Any = copy, _name: str = name) -> Any:
            happened.append(_name)
            return _copy(*arguments)

        monkeypatch.setattr(Transfer, name, counted)
    return happened


def test_a_plan_is_one_copy(copies: list[str]) -> None:
    """Newcomers in a mixed iteration, decodes, decodes with new blocks: greedy and drawn rows ask for no other."""
    runner, _ = with_graphs()
    server = Server(runner)
    copies.clear()
    server.step({0: REQUESTS["A"], 1: REQUESTS["B"]})
    assert copies == ["fill"]
    for number in range(2, 7):
        server.step()
        assert copies == ["fill"] * number
    assert any(len(table) > 2 for table in server.tables.values())


@pytest.mark.parametrize("captured", [True, False])
def test_the_next_decode_reads_the_token_on_the_device(captured: bool, expected: dict[str, list[int]]) -> None:
    """Also beside a newcomer. The host's copy is wrong, and does not matter."""
    runner, graphs = with_graphs() if captured else (Runner(StubModel(), CARD, LIMITS, recorder=Eager()), None)
    server = Server(runner)
    server.step({0: REQUESTS["A"]})
    for newcomer in ({}, {}, {1: REQUESTS["B"]}, {}):
        runner.state.tokens[0, runner.state.length[0] - 1] = 59
        server.step(newcomer)
    assert server.output[0] == expected["A"][:5]
    assert graphs is None or (graphs.replayed, graphs.replayed_mixed) == ([1, 1, 2], [(32, 8), (32, 8)])


def test_padding_rows_write_nowhere() -> None:
    limits = Limits(block_size=4, num_blocks=8, num_host_blocks=0, max_num_seqs=4, max_num_batched_tokens=32)
    graphs = ReplayByCall(StubModel())
    runner = Runner(graphs.model, CARD, limits, recorder=graphs)
    for layer in (*runner.cache.k, *runner.cache.v):
        layer.fill_(float("nan"))
    runner.capture()
    assert all(bool(layer.isnan().all()) for layer in (*runner.cache.k, *runner.cache.v))
    new = [new_sequence(slot, [5, 6], [slot], temperature=0.0, ignore_eos=True) for slot in range(3)]
    run(runner, prefill_plan(1, *new))
    run(runner, decode_plan(2, 2, 0, 1))
    assert graphs.replayed == [4]
    held = (~runner.cache.k[0].isnan().all(-1).squeeze(-1)).sum(1)
    assert held.tolist() == [3, 3, 3, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("in_graph", [1, 1024])
def test_sequences_that_come_in_to_decode(
    in_graph: int, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their KV is there (it was swapped in, say), so the first iteration is one of decodes, with many patches."""
    monkeypatch.setattr(stage, "PATCHES_IN_GRAPH", in_graph)
    runner, graphs = with_graphs()
    names = "AB"
    tokens = [[*REQUESTS[name]["tokens"], *expected[name][:3]] for name in names]
    run(runner, prefill_plan(1, *(new_sequence(slot, tokens[slot][:-1], [2 * slot, 2 * slot + 1]) for slot in (0, 1))))
    back = tuple(
        new_sequence(
            slot,
            generation=2,
            blocks=[2 * (1 - slot), 2 * (1 - slot) + 1],
            prompt_length=len(REQUESTS[name]["tokens"]),
            computed=len(tokens[1 - slot]) - 1,
            **(REQUESTS[name] | {"tokens": tokens[1 - slot]}),
        )
        for slot, name in ((0, "B"), (1, "A"))
    )
    result = run(runner, Plan(1, 2, freed=slots(0, 1), new=back, decodes=slots(1, 0)))
    assert result.tokens.tolist() == [expected["A"][3], expected["B"][3]]
    assert graphs.replayed == [2]


def test_more_rows_than_the_largest_graph(monkeypatch: pytest.MonkeyPatch, expected: dict[str, list[int]]) -> None:
    monkeypatch.setattr("executor_svc.graphs.MAX_GRAPH_TOKENS", 2)
    runner, graphs = with_graphs()
    assert outputs(runner) == expected
    assert graphs.recorded == [2, 1] and set(graphs.replayed) == {1, 2}


def test_prompt_logprobs_and_a_plan_without_work(expected: dict[str, list[int]]) -> None:
    runner, _ = with_graphs()
    plain = Runner(StubModel(), CARD, LIMITS)
    prompt = list(range(10, 20))
    first = prefill_plan(1, new_sequence(0, prompt, [0, 1, 2], temperature=0.0, logprobs=1, prompt_logprobs=2))
    idle = Plan(1, 2, appended_slots=slots(0), appended_blocks=ids(7))
    for plan in (first, idle, decode_plan(3, 0)):
        assert runner.run(plan).tokens.tolist() == run(plain, plan).tokens.tolist()  # type: ignore[union-attr]
    assert isinstance(runner.inputs, DeviceInputs)
    table = runner.inputs._columns.slots.block_tables[0]
    assert table[:4].tolist() == [0, 1, 2, 7]


def test_warm_up_runs_every_graph(expected: dict[str, list[int]]) -> None:
    graphs = ReplayByCall(StubModel())
    runner = Runner(graphs.model, CARD, LIMITS, recorder=graphs)
    warm_up(runner)
    assert not graphs.recorded
    assert warm_up_graphs(runner) == 8
    assert set(graphs.replayed) == set(graphs.recorded) == {1, 2, 4, 8}
    assert set(graphs.replayed_mixed) == set(graphs.recorded_mixed) == {(tokens, 8) for tokens in (32, 64, 96, 128)}
    assert not runner.state.columns.live.any()
    assert outputs(runner) == expected


def test_warm_up_reaches_the_bounds_of_every_iteration() -> None:
    # What a kernel takes from a bound that no warm-up reached, it takes first while a request waits.
    reached: list[tuple[int, int, int]] = []

    class Model(StubModel):
        def forward(self, *arguments: Any) -> torch.Tensor:
            token_ids, batch = arguments[0], arguments[3]
            reached.append((len(batch.context_lens), len(token_ids), batch.block_tables.shape[1]))
            return super().forward(*arguments)

    for num_blocks, widest in ((64, 16), (24, 24 - 11)):
        reached.clear()
        limits = Limits(4, num_blocks, 0, 8, 24)
        warm_up(Runner(Model(), replace(CARD, max_model_len=63), limits, recorder=Eager()))
        assert (8, 24, widest) in reached, "rows, tokens and blocks at once"
        assert (8, 8, widest) in reached, "and of decodes"


def test_graphs_share_their_result() -> None:
    shared = SharedResult()
    large, small = shared.like(torch.ones(8, 5)), shared.like(torch.ones(2, 5))
    assert large.shape == (8, 5) and small.shape == (2, 5)
    assert large.data_ptr() == small.data_ptr(), "512 rows of 128k tokens, by 48 graphs, would be gigabytes"
    with pytest.raises(ValueError, match="behind one of"):
        shared.like(torch.ones(9, 5))


def sized(seats: int, tokens: int = 100_000) -> Limits:
    return Limits(block_size=16, num_blocks=8, num_host_blocks=0, max_num_seqs=seats, max_num_batched_tokens=tokens)


def test_sizes_of_graphs() -> None:
    assert decode_sizes(sized(1)) == [1]
    assert decode_sizes(sized(17)) == [1, 2, 4, 8, 16, 17]
    assert decode_sizes(sized(17, tokens=5)) == [1, 2, 4, 5]
    assert decode_sizes(sized(64)) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
    sizes = decode_sizes(sized(100_000))
    assert sizes[-1] == 512 and sizes == sorted(set(sizes)) and np.diff(sizes).max() == 16
