"""Families beside the first six against `transformers`, and their rows against each other (C26, C30, C32)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from safetensors import safe_open
from transformers import PreTrainedModel

from executor_svc.model import Decoder, load_model
from executor_svc.model.destinations import destinations
from tests.executor.paged_driver import Stream, generate
from tests.executor.tiny_models import MORE_FAMILIES, make_model, save_model

LENGTHS = (1, 9, 40, 75)
"""Below and above every window of the models."""
NEW_TOKENS = 12
WHOLE = 1000


@dataclass
class Case:
    folder: str
    model: PreTrainedModel
    decoder: Decoder
    prompts: list[list[int]]
    solo: list[Stream]
    """Each prompt alone, prefilled at once."""


Cases = Callable[[str], Case]


def random_prompts(lengths: tuple[int, ...], seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, 260, (length,), generator=generator).tolist() for length in lengths]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    @functools.cache
    def make(family: str) -> Case:
        model = make_model(family)
        folder = str(save_model(model, tmp_path_factory.mktemp(family)))
        decoder = load_model(folder, cpu_step="torch").decoder
        prompts = random_prompts(LENGTHS)
        solo = [generate(decoder, [p], NEW_TOKENS, chunk=WHOLE, block_size=16, all_logits=True)[0] for p in prompts]
        return Case(folder, model, decoder, prompts, solo)

    return make


@pytest.mark.parametrize("family", MORE_FAMILIES)
def test_logits_and_greedy_tokens_equal_transformers(cases: Cases, family: str) -> None:
    """Of prefill and decode: one pass of the reference over the whole text says what each of its tokens is given."""
    case = cases(family)
    for prompt, stream in zip(case.prompts, case.solo, strict=True):
        with torch.inference_mode():
            reference = case.model(torch.tensor([stream.tokens[:-1]])).logits[0]
        assert float((torch.stack(stream.logits) - reference).abs().max()) < 1e-4, len(prompt)
        assert stream.generated == reference[len(prompt) - 1 :].argmax(-1).tolist(), len(prompt)
    assert len({token for stream in case.solo for token in stream.generated}) >= 10  # worth comparing


@pytest.mark.parametrize("family", MORE_FAMILIES)
def test_rows_have_the_same_bits_in_any_company_and_in_chunks(cases: Cases, family: str) -> None:
    case = cases(family)
    for count, chunk, block_size in ((2, 7, 16), (7, WHOLE, 32), (32, 33, 16)):
        others = random_prompts((3,) * max(0, count - len(LENGTHS)), seed=count)
        streams = generate(
            case.decoder,
            [*case.prompts[-count:], *others],
            NEW_TOKENS,
            chunk=chunk,
            block_size=block_size,
            all_logits=True,
        )
        for stream, alone in zip(streams, case.solo[-count:], strict=False):
            assert torch.equal(torch.stack(stream.logits), torch.stack(alone.logits)), (count, chunk)


@pytest.mark.parametrize("family", MORE_FAMILIES)
def test_every_tensor_of_the_file_has_one_place_of_its_own(cases: Cases, family: str) -> None:
    """A number written to each place stays there: none reaches into another, and together they are all parameters."""
    case = cases(family)
    decoder = load_model(case.folder, cpu_step="torch").decoder
    assert isinstance(decoder, Decoder)
    places = destinations(decoder.config, decoder.weights)
    with safe_open(f"{case.folder}/model.safetensors", framework="pt") as file:
        assert set(places) == set(file.keys())
    for number, place in enumerate(places.values()):
        place.tensor.fill_(number)
    for number, place in enumerate(places.values()):
        assert bool((place.tensor == number).all())
    elements = sum(place.tensor.numel() for place in places.values())
    assert elements == sum(parameter.numel() for parameter in case.model.parameters())
