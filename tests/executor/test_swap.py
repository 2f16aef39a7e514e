"""KV goes to the host pool and comes back: whoever was swapped says what it would have said undisturbed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from common.wire import Fault, Limits, Plan, Result, SamplingParams
from executor_svc.fake_model import invented_card
from executor_svc.fake_runner import ScriptedRunner
from executor_svc.model import LoadedModel, load_model
from executor_svc.pseudo_model import expected_tokens
from executor_svc.runner import Runner
from executor_svc.script import Script
from tests.executor.plans import decode_plan, ids, new_sequence, prefill_plan, slots
from tests.executor.swap_server import PlanRunner, SwapServer
from tests.executor.tiny_models import make_model, save_model

LIMITS = Limits(block_size=4, num_blocks=40, num_host_blocks=64, max_num_seqs=3, max_num_batched_tokens=64)
PROMPTS = {"A": [50, 60, 70], "B": [90, 80, 70, 60, 50] * 7, "C": [110], "D": list(range(10, 27)), "E": [300, 310]}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "A": {"temperature": 0.0},
    "B": {"temperature": 1.0, "seed": 5, "top_k": 50},
    "C": {"temperature": 0.0, "repetition_penalty": 2.0},
    "D": {"temperature": 0.0, "frequency_penalty": 1.5, "bias_ids": ids(9), "bias_values": np.array([2], np.float32)},
    "E": {"temperature": 0.9, "seed": 77, "top_p": 0.9, "presence_penalty": 1.0},
}
REQUESTS = {
    name: {"tokens": prompt, "max_tokens": 14, "ignore_eos": True, **SAMPLINGS[name]}
    for name, prompt in PROMPTS.items()
}
CARD = invented_card(vocab_size=400, max_model_len=128)


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = save_model(make_model(request.param), tmp_path_factory.mktemp("models") / request.param)
    return load_model(str(folder), dtype="float32")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny products are slower on more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def scripted() -> ScriptedRunner:
    return ScriptedRunner(Script(), CARD, LIMITS)


def take_turns(make: Callable[[], PlanRunner], seed: int, chunk: int, *, decode_rows: bool = True) -> SwapServer:
    """Random turns of up to three of the five, each some iterations long, until all have ended."""
    server, draw = SwapServer(make(), REQUESTS), random.Random(seed)
    while names := server.unfinished:
        members = draw.sample(names, min(len(names), draw.randint(1, 3)))
        for _ in range(draw.randint(1, 3)):
            server.step([name for name in members if name in server.unfinished], chunk, decode_rows=decode_rows)
    return server


def outputs(server: SwapServer) -> dict[str, list[int]]:
    return {name: job.output for name, job in server.jobs.items()}


def undisturbed(make: Callable[[], PlanRunner]) -> dict[str, list[int]]:
    """Each alone, in one go."""
    found = {}
    for name in REQUESTS:
        server = SwapServer(make(), {name: REQUESTS[name]})
        while server.unfinished:
            server.step([name], 64)
        found[name] = server.jobs[name].output
    return found


@pytest.mark.parametrize("decode_rows", [True, False], ids=["decodes", "chunks of one"])
def test_a_swapped_sequence_says_the_same(loaded: LoadedModel, decode_rows: bool) -> None:
    """Greedy, seeded and penalised; in mid-prefill and between decodes; with whole and with begun blocks."""

    def make() -> Runner:
        runner = Runner(loaded.decoder, loaded.card, LIMITS)
        for layer in (*runner.cache.k, *runner.cache.v):
            layer.fill_(float("nan"))
        return runner

    expected = undisturbed(make)
    assert all(len(tokens) == 14 for tokens in expected.values())
    seen, num_reused = set(), 0
    for seed, chunk in ((1, 5), (2, 3), (3, 64)):
        server = take_turns(make, seed, chunk, decode_rows=decode_rows)
        assert outputs(server) == expected
        seen |= {(at < prompt_length, at % 4 == 0) for at, prompt_length in server.returns}
        num_reused += server.num_reused
    assert seen == {(prefilling, whole) for prefilling in (True, False) for whole in (True, False)}
    assert num_reused > 10


@pytest.mark.parametrize("seed", range(10))
def test_a_scripted_executor_moves_its_pseudo_kv_likewise(seed: int) -> None:
    runner = scripted()
    server = take_turns(lambda: runner, seed, 1 + seed)
    assert runner.pseudo.num_corrupt == 0 and server.num_reused and server.returns
    for name, job in server.jobs.items():
        params = SamplingParams(14, REQUESTS[name]["temperature"], seed=REQUESTS[name].get("seed", 0))
        assert job.output == expected_tokens(PROMPTS[name], 14, runner.alphabet, params)


def run(runner: PlanRunner, plan: Plan) -> Result:
    result = runner.run(plan)
    assert isinstance(result, Result), result
    return result


def both_runners(loaded: LoadedModel) -> list[PlanRunner]:
    return [Runner(loaded.decoder, loaded.card, LIMITS), scripted()]


def test_outs_come_before_ins_and_ins_before_copies(loaded: LoadedModel) -> None:
    """One plan moves a block out, another one in over it, copies that, and computes with both."""
    for runner in both_runners(loaded):
        one, other = [50, 60, 70, 80, 90], [15, 16, 17, 18, 19, 20]
        undisturbed = run(runner, prefill_plan(1, new_sequence(0, one, [0, 1]), new_sequence(1, other, [2, 3])))
        run(runner, Plan(1, 2, freed=slots(0), swap_outs=ids(0, 7, 1, 3)))
        # The other's blocks go to the host; the first one's come into them, and a copy of its first block is shared.
        mate = new_sequence(2, [*one[:4], 33], [9, 10], computed=4)
        back = new_sequence(0, one, [3, 2], computed=4, generation=2)
        plan = Plan(
            1,
            3,
            freed=slots(1),
            swap_outs=ids(2, 5, 3, 6),
            swap_ins=ids(7, 3, 3, 2),
            copies=ids(3, 9),
            new=(back, mate),
            prefills=slots(0, 2),
            prefill_lengths=ids(1, 1),
        )
        tokens = run(runner, plan).tokens.tolist()
        assert tokens[0] == undisturbed.tokens[0]
        again = new_sequence(1, other, [0, 1], computed=5, generation=2)
        decoded = decode_plan(4, 1, new=(again,), swap_ins=ids(5, 0, 6, 1))
        assert run(runner, decoded).tokens.tolist() == [undisturbed.tokens[1]]
        runner.reset()
        assert run(runner, prefill_plan(5, new_sequence(0, [*one[:4], 33], [0, 1]))).tokens.tolist() == tokens[1:]


def test_a_block_may_go_out_and_straight_back(loaded: LoadedModel) -> None:
    for runner in both_runners(loaded):
        (token,) = run(runner, prefill_plan(1, new_sequence(0, [50, 60, 70], [0]))).tokens.tolist()
        moved = new_sequence(1, [50, 60, 70], [5], computed=2)
        plan = decode_plan(2, 1, freed=slots(0), new=(moved,), swap_outs=ids(0, 9), swap_ins=ids(9, 5))
        assert run(runner, plan).tokens.tolist() == [token]


@pytest.mark.parametrize(
    "ins", [ids(), ids(0, 8, 1, 9), ids(1, 5, 0, 6), ids(2, 5, 3, 6)], ids=["none", "elsewhere", "crossed", "stale"]
)
def test_a_scripted_executor_notices_a_wrong_swap(ins: Any) -> None:
    """Wherever the fault lies, the context is not the sequence's own, and the token another one."""
    prompt, runner = [17, 4, 250, 9, 9, 30, 7], scripted()
    run(runner, prefill_plan(1, new_sequence(0, prompt, [1, 2]), new_sequence(1, prompt[::-1], [3, 4])))
    run(runner, Plan(1, 2, freed=slots(0, 1), swap_outs=ids(1, 0, 2, 1, 3, 2, 4, 3)))
    back = new_sequence(0, [*prompt, 11], [5, 6], computed=7, generation=2)
    result = run(runner, decode_plan(3, 0, new=(back,), swap_ins=ins))
    assert runner.pseudo.num_corrupt == 1
    assert result.tokens.tolist() != expected_tokens([*prompt, 11], 1, runner.alphabet, SamplingParams(1))


def test_the_host_pool_outlives_nothing(loaded: LoadedModel) -> None:
    """After a reset the sequences are forgotten, and the host blocks can be written anew."""
    for runner in both_runners(loaded):
        (token,) = run(runner, prefill_plan(1, new_sequence(0, [50, 60, 70], [0]))).tokens.tolist()
        run(runner, Plan(1, 2, freed=slots(0), swap_outs=ids(0, 0)))
        runner.reset()
        run(runner, prefill_plan(3, new_sequence(0, [50, 60, 70], [1])))
        run(runner, Plan(1, 4, freed=slots(0), swap_outs=ids(1, 0)))
        back = new_sequence(0, [50, 60, 70], [2], computed=2, generation=2)
        assert run(runner, decode_plan(5, 0, new=(back,), swap_ins=ids(0, 2))).tokens.tolist() == [token]


def test_no_swap_without_a_host_pool(loaded: LoadedModel) -> None:
    limits = Limits(block_size=4, num_blocks=8, num_host_blocks=0, max_num_seqs=2, max_num_batched_tokens=8)
    for runner in (Runner(loaded.decoder, loaded.card, limits), ScriptedRunner(Script(), CARD, limits)):
        for moves in ({"swap_outs": ids(0, 0)}, {"swap_ins": ids(0, 0)}):
            fault = runner.run(Plan(1, 1, **moves))
            assert isinstance(fault, Fault) and fault.reason == "plan" and "out of range" in fault.message
