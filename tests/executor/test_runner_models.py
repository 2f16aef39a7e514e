"""Whole generations through the runner: the same tokens alone, in company, resumed, and as `transformers`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.wire import Limits
from executor_svc.model import LoadedModel, load_model
from executor_svc.runner import Runner
from tests.executor.mini_server import Server
from tests.executor.plans import ids
from tests.executor.tiny_models import make_model, save_model

LIMITS = Limits(block_size=4, num_blocks=120, num_host_blocks=0, max_num_seqs=6, max_num_batched_tokens=256)
REQUESTS: dict[str, dict[str, Any]] = {
    "A": {"tokens": [50, 60, 70], "temperature": 0.0, "max_tokens": 9},
    "B": {"tokens": [90, 80, 70, 60, 50] * 9, "temperature": 1.0, "seed": 5, "top_k": 50, "max_tokens": 16},
    "C": {"tokens": [110], "temperature": 0.0, "repetition_penalty": 2.0, "max_tokens": 16},
    "D": {
        "tokens": list(range(10, 27)),
        "temperature": 0.0,
        "bias_ids": ids(9),
        "bias_values": np.array([2], np.float32),
        "min_tokens": 8,
        "max_tokens": 16,
        "logprobs": 2,
    },
    "E": {
        "tokens": [300, 310],
        "temperature": 0.9,
        "seed": 77,
        "top_p": 0.9,
        "presence_penalty": 1.0,
        "max_tokens": 16,
    },
}
for request in REQUESTS.values():
    request["ignore_eos"] = True


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny products are slower on more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, LoadedModel]:
    model = make_model(request.param)
    folder = save_model(model, tmp_path_factory.mktemp("models") / request.param)
    return model, load_model(str(folder), dtype="float32")


def generate(loaded: LoadedModel, names: str, chunk: int | None = None) -> dict[str, list[int]]:
    """Requests arriving one iteration apart."""
    server = Server(Runner(loaded.decoder, loaded.card, LIMITS))
    for slot, name in enumerate(names):
        server.step({slot: REQUESTS[name]}, chunk)
    while len(server.ended) < len(names):
        server.step()
    return {name: server.output[slot] for slot, name in enumerate(names)}


@pytest.fixture(scope="module")
def solo(loaded: tuple[Any, LoadedModel]) -> dict[str, list[int]]:
    return {name: generate(loaded[1], name)[name] for name in REQUESTS}


def test_greedy_is_what_transformers_generates(loaded: tuple[Any, LoadedModel]) -> None:
    model, ours = loaded
    prompts = [[50], [60, 70, 80], list(range(100, 145)), list(range(200, 270))]
    server = Server(Runner(ours.decoder, ours.card, LIMITS))
    requests = [{"tokens": p, "temperature": 0.0, "max_tokens": 20, "ignore_eos": True} for p in prompts]
    server.step({0: requests[0], 1: requests[1]})
    server.step({2: requests[2]}, chunk=7)
    server.step({3: requests[3]}, chunk=16)
    while len(server.ended) < 4:
        server.step()
    for slot, prompt in enumerate(prompts):
        with torch.no_grad():
            whole = model.generate(
                torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=-1, pad_token_id=0
            )
        assert server.output[slot] == whole[0, len(prompt) :].tolist()


@pytest.mark.parametrize("order", ["ABCDE", "EDCBA", "CADEB"])
def test_the_same_alone_and_in_company(loaded: tuple[Any, LoadedModel], solo: dict[str, list[int]], order: str) -> None:
    assert generate(loaded[1], order) == solo


@pytest.mark.parametrize("chunk", [1, 7])
def test_the_same_in_chunks(loaded: tuple[Any, LoadedModel], solo: dict[str, list[int]], chunk: int) -> None:
    assert generate(loaded[1], "ABCDE", chunk) == solo


def test_the_same_resumed(loaded: tuple[Any, LoadedModel], solo: dict[str, list[int]]) -> None:
    """Each is taken away after 5 tokens, and goes on elsewhere from prompt and output."""
    server = Server(Runner(loaded[1].decoder, loaded[1].card, LIMITS))
    for slot, (name, request) in enumerate(REQUESTS.items()):
        tokens = [*request["tokens"], *solo[name][:5]]
        resumed = request | {"tokens": tokens, "prompt_length": len(request["tokens"])}
        server.step({slot: resumed}, chunk=8)
    while len(server.ended) < len(REQUESTS):
        server.step()
    assert [server.output[slot] for slot in range(5)] == [tokens[5:] for tokens in solo.values()]


def test_the_requests_are_worth_comparing(solo: dict[str, list[int]]) -> None:
    assert {name: len(tokens) for name, tokens in solo.items()} == {"A": 9, "B": 16, "C": 16, "D": 16, "E": 16}
    assert len({token for tokens in solo.values() for token in tokens}) >= 10
    for one, other in itertools.combinations(solo.values(), 2):
        assert one != other


def test_the_fingerprint_is_of_the_files(loaded: tuple[Any, LoadedModel], tmp_path: Path) -> None:
    other = save_model(make_model("llama", seed=1), tmp_path)
    assert load_model(str(other), dtype="float32").card.fingerprint != loaded[1].card.fingerprint
