"""The runner over a stub model."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from common.wire import Fault, Limits, Plan, Result, decode, encode
from executor_svc.faults import FatalError
from executor_svc.kv_cache import KVCache, block_bytes
from executor_svc.runner import Runner
from executor_svc.warm_up import KINDS, WarmUpError, warm_up
from tests.executor.mini_server import Server, run
from tests.executor.plans import ids, new_sequence, prefill_plan, slots
from tests.executor.stub_model import CARD, LIMITS, REQUESTS, VOCABULARY, StubModel, StubShape


@pytest.fixture
def runner() -> Runner:
    return Runner(StubModel(), CARD, LIMITS)


def alone(name: str, chunk: int | None = None) -> list[int]:
    server = Server(Runner(StubModel(), CARD, LIMITS))
    server.step({3: REQUESTS[name]}, chunk)
    while 3 not in server.ended:
        server.step()
    return server.output[3]


@pytest.fixture(scope="module")
def solo() -> dict[str, list[int]]:
    return {name: alone(name) for name in REQUESTS}


@pytest.mark.parametrize("order", list(itertools.permutations("ABCD")), ids="".join)
def test_a_request_s_tokens_do_not_depend_on_the_others(order: tuple[str, ...], solo: dict[str, list[int]]) -> None:
    """C15: any order of arrival, one iteration apart; then the first to leave is followed by E in its slot."""
    server = Server(Runner(StubModel(), CARD, LIMITS))
    for slot, name in enumerate(order):
        server.step({slot: REQUESTS[name]})
    while not server.ended:
        server.step()
    seat = min(server.ended)
    done = server.output[seat]
    server.free(seat)
    server.step({seat: REQUESTS["E"]})
    while len(server.ended) < len(order):
        server.step()
    assert done == solo[order[seat]]
    assert server.output[seat] == solo["E"]
    for slot, name in enumerate(order):
        if slot != seat:
            assert server.output[slot] == solo[name]


@pytest.mark.parametrize("chunk", [1, 2, 4, 7])
def test_chunks_make_no_difference(chunk: int, solo: dict[str, list[int]]) -> None:
    assert {name: alone(name, chunk) for name in REQUESTS} == solo


def test_a_resumed_sequence_says_the_same(runner: Runner, solo: dict[str, list[int]]) -> None:
    for slot, name in enumerate("ABCDE"):
        request, output = REQUESTS[name], solo[name]
        tokens = [*request["tokens"], *output[:4]]
        blocks = list(range(slot * 8, slot * 8 + 8))
        resumed = new_sequence(
            slot, blocks=blocks, prompt_length=len(request["tokens"]), **(request | {"tokens": tokens})
        )
        assert run(runner, prefill_plan(slot + 1, resumed)).tokens.tolist() == output[4:5]


def test_prefix_hits_copies_and_swaps(runner: Runner, solo: dict[str, list[int]]) -> None:
    """D's first two blocks, through the host and a copy, under another sequence."""
    prompt = REQUESTS["D"]["tokens"]
    run(runner, prefill_plan(1, new_sequence(0, prompt, [5, 6, 7])))
    run(runner, Plan(1, 2, freed=slots(0), swap_outs=ids(5, 3, 6, 0)))
    for layer in (*runner.cache.k, *runner.cache.v):
        layer.zero_()
    hit = new_sequence(1, blocks=[20, 31, 9], computed=8, **REQUESTS["D"])
    plan = prefill_plan(3, hit, swap_ins=ids(3, 30, 0, 31), copies=ids(30, 20))
    assert run(runner, plan).tokens.tolist() == solo["D"][:1]


def test_no_host_pool_unless_it_is_asked_for() -> None:
    limits = Limits(block_size=4, num_blocks=8, num_host_blocks=0, max_num_seqs=2, max_num_batched_tokens=8)
    assert Runner(StubModel(), CARD, limits).host is None


def test_logprobs_and_prompt_logprobs_in_chunks(runner: Runner) -> None:
    prompt = list(range(10, 20))
    request = {"temperature": 0.0, "logprobs": 1, "prompt_logprobs": 2}
    whole = run(runner, prefill_plan(1, new_sequence(0, prompt, [0, 1, 2], **request)))
    (all_at_once,) = whole.prompt_logprobs
    assert (all_at_once.start, len(all_at_once.widths)) == (1, 9)
    pieces = []
    new = (new_sequence(1, prompt, [3, 4, 5], **request),)
    for iteration, count in ((2, 4), (3, 4), (4, 2)):
        plan = Plan(1, iteration, prefills=slots(1), prefill_lengths=ids(count), new=new if iteration == 2 else ())
        result = run(runner, plan)
        pieces += result.prompt_logprobs
    assert [(piece.start, len(piece.widths)) for piece in pieces] == [(1, 4), (5, 4), (9, 1)]
    assert np.concatenate([p.token_ids for p in pieces]).tolist() == all_at_once.token_ids.tolist()
    assert np.concatenate([p.values for p in pieces]).tolist() == all_at_once.values.tolist()
    assert result.logprobs == whole.logprobs


def test_prompt_logits_are_bounded(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """More prompt rows than fit at a time take more passes, and say the same."""
    prompts = [[(7 * i + j) % VOCABULARY for i in range(40)] for j in (1, 2, 3)]
    new = [
        new_sequence(slot, prompt, list(range(slot * 10, slot * 10 + 10)), prompt_logprobs=1)
        for slot, prompt in enumerate(prompts)
    ]
    whole = run(runner, prefill_plan(1, *new))
    monkeypatch.setattr("executor_svc.runner.MAX_SCORED_BYTES", 0)
    runner.reset()
    pieces = run(runner, prefill_plan(1, *new))
    assert [(item.slot, item.start, len(item.widths)) for item in pieces.prompt_logprobs] == [
        (0, 1, 39),
        (1, 1, 25),
        (1, 26, 14),
        (2, 1, 39),
    ]
    assert pieces.tokens.tolist() == whole.tokens.tolist()
    for name in ("token_ids", "values", "widths"):
        one, other = (np.concatenate([getattr(item, name) for item in r.prompt_logprobs]) for r in (whole, pieces))
        np.testing.assert_array_equal(one, other)


def test_a_prompt_of_one_token_has_no_prompt_logprobs(runner: Runner) -> None:
    result = run(runner, prefill_plan(1, new_sequence(0, [5], [0], prompt_logprobs=1)))
    assert result.prompt_logprobs == () and len(result.tokens) == 1


def test_output_is_not_scored_as_prompt(runner: Runner) -> None:
    resumed = new_sequence(0, [5, 6, 7, 8], [0], prompt_length=2, prompt_logprobs=0)
    (scored,) = run(runner, prefill_plan(1, resumed)).prompt_logprobs
    assert (scored.start, scored.token_ids.tolist()) == (1, [6])


def test_a_plan_without_work(runner: Runner) -> None:
    run(runner, prefill_plan(1, new_sequence(0, [5], [0])))
    assert len(run(runner, Plan(1, 2, freed=slots(0))).tokens) == 0


def test_a_bad_plan_is_a_fault_and_leaves_the_runner_usable(runner: Runner) -> None:
    fault = runner.run(prefill_plan(1, new_sequence(0, [5], [64])))
    assert isinstance(fault, Fault)
    assert (fault.reason, fault.slots.tolist(), fault.iteration) == ("plan", [0], 1)
    runner.reset()
    run(runner, prefill_plan(1, new_sequence(0, [5], [63])))


def test_rows_with_nan_are_named(runner: Runner) -> None:
    assert isinstance(runner.model, StubModel)
    runner.model.broken_token = 33
    new = (new_sequence(0, [5], [0]), new_sequence(4, [33], [1]), new_sequence(2, [6], [2]))
    fault = runner.run(prefill_plan(1, *new))
    assert isinstance(fault, Fault)
    assert (fault.reason, fault.slots.tolist()) == ("nan", [4])


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("boom"), "error"),
        (torch.OutOfMemoryError("full"), "memory"),
        (MemoryError("numpy has no room"), "memory"),
    ],
)
def test_an_exception_in_the_model_is_a_fault(runner: Runner, error: Exception, reason: str) -> None:
    assert isinstance(runner.model, StubModel)
    runner.model.error = error
    fault = runner.run(prefill_plan(7, new_sequence(0, [5], [0]), epoch=3))
    assert isinstance(fault, Fault)
    assert (fault.reason, fault.epoch, fault.iteration) == (reason, 3, 7)
    assert str(error) in fault.message
    assert decode(encode(fault)) == fault


def test_a_broken_device_is_fatal_and_told(runner: Runner) -> None:
    assert isinstance(runner.model, StubModel)
    runner.model.error = torch.AcceleratorError("device-side assert")
    with pytest.raises(FatalError) as caught:
        runner.run(prefill_plan(1, new_sequence(0, [5], [0])))
    assert caught.value.fault.reason == "device"


def test_timings_are_told(runner: Runner) -> None:
    result = run(runner, prefill_plan(1, new_sequence(0, [5], [0])))
    assert result.busy_us >= result.device_us > 0


def test_warm_up_leaves_nothing_behind(runner: Runner, solo: dict[str, list[int]]) -> None:
    warm_up(runner)
    assert not runner.state.columns.live.any()
    server = Server(runner)
    server.step({0: REQUESTS["A"]})
    assert server.output[0] == solo["A"][:1]


@pytest.mark.parametrize("seats", [1, 3, 4])
def test_warm_up_draws_in_every_way_however_few_seats_there_are(seats: int, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(StubModel(), CARD, replace(LIMITS, max_num_seqs=seats))
    seen = []
    answer = runner.run

    def watched(plan: Plan) -> Result | Fault:
        seen.extend(new.params for new in plan.new)
        return answer(plan)

    monkeypatch.setattr(runner, "run", watched)
    warm_up(runner)
    assert all(any(params is kind for params in seen) for kind in KINDS)


def test_warm_up_tells_what_does_not_run(runner: Runner) -> None:
    assert isinstance(runner.model, StubModel)
    runner.model.error = RuntimeError("no such kernel")
    with pytest.raises(WarmUpError, match="no such kernel"):
        warm_up(runner)


def test_bytes_of_a_block() -> None:
    cache = KVCache.allocate(StubShape(), 3, 4, torch.float32, torch.device("cpu"))
    total = sum(layer.nbytes for layer in (*cache.k, *cache.v))
    assert total == 3 * block_bytes(StubShape(), 4, torch.float32)


def test_the_requests_are_worth_comparing(solo: dict[str, list[int]]) -> None:
    assert {name: len(tokens) for name, tokens in solo.items()} == {"A": 7, "B": 12, "C": 12, "D": 12, "E": 12}
    assert len({tuple(tokens) for tokens in solo.values()}) == 5
    assert all(len(set(solo[name])) >= 4 for name in "BCE")
