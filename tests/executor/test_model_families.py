"""Every family against `transformers`: greedy tokens and logits, batched, in chunks, over blocks of any size."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from executor_svc.model import Decoder, load_model
from tests.executor.paged_driver import generate, prompt_logits
from tests.executor.tiny_models import FAMILIES, make_model, save_model

LENGTHS = (1, 2, 7, 16, 17, 33, 64, 100, 201, 300)
NEW_TOKENS = 40
WHOLE = 1000
WAYS = {
    family: [*itertools.product((1, 7, 16, WHOLE), (1, 16, 32))]
    if family in ("llama", "mistral")
    else [(1, 16), (7, 1), (7, 32), (16, 16), (WHOLE, 1), (WHOLE, 32)]
    for family in FAMILIES
}
"""Chunks and block sizes; all pairs for one family of full attention and one of windows."""
ALWAYS = [(7, 32), (16, 16), (WHOLE, 1)]
"""The ways of every run; the others run nightly, but for one token at a time in those two families."""


@dataclass
class Case:
    decoder: Decoder
    prompts: list[list[int]]
    reference: list[list[int]]
    """What `transformers` generates greedily, one prompt at a time."""
    reference_logits: list[torch.Tensor]
    """[NEW_TOKENS, vocab] of each prompt."""


Cases = Callable[[str], Case]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    """The case of a family, made once."""

    @functools.cache
    def make(family: str) -> Case:
        model = make_model(family)
        folder = save_model(model, tmp_path_factory.mktemp(family))
        generator = torch.Generator().manual_seed(1)
        prompts = [torch.randint(4, 260, (length,), generator=generator).tolist() for length in LENGTHS]
        reference, logits = [], []
        for prompt in prompts:
            out = model.generate(
                torch.tensor([prompt]),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
            reference.append(out.sequences[0, len(prompt) :].tolist())
            logits.append(torch.cat(out.logits))
        return Case(load_model(str(folder), cpu_step="torch").decoder, prompts, reference, logits)

    return make


@pytest.mark.parametrize("family", FAMILIES)
def test_the_reference_is_worth_comparing_with(cases: Cases, family: str) -> None:
    reference = cases(family).reference
    assert min(len(set(tokens)) for tokens in reference) >= 10
    assert len({tuple(tokens[:8]) for tokens in reference}) == len(LENGTHS)


@pytest.mark.parametrize(
    ("family", "chunk", "block_size"),
    [
        pytest.param(
            family,
            *way,
            marks=[] if way in ALWAYS or (len(ways) > 6 and way == (1, 16)) else [pytest.mark.nightly],
        )
        for family, ways in WAYS.items()
        for way in ways
    ],
)
def test_greedy_tokens_equal_transformers(cases: Cases, family: str, chunk: int, block_size: int) -> None:
    case = cases(family)
    streams = generate(case.decoder, case.prompts, NEW_TOKENS, chunk=chunk, block_size=block_size)
    assert [stream.generated for stream in streams] == case.reference
    worst = max(
        float((torch.stack(stream.logits) - logits).abs().max())
        for stream, logits in zip(streams, case.reference_logits, strict=True)
    )
    assert worst < 1e-4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_low_precision_stays_near(family: str, dtype: str, tmp_path: Path) -> None:
    model = make_model(family)
    save_model(model, tmp_path)
    decoder = load_model(str(tmp_path), dtype=dtype, cpu_step="torch").decoder
    tokens = torch.randint(4, 260, (40,), generator=torch.Generator().manual_seed(2)).tolist()
    logits = prompt_logits(decoder, tokens)
    with torch.inference_mode():
        wide = model(torch.tensor([tokens])).logits[0]
        narrow = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)(torch.tensor([tokens])).logits[0].float()
    error = (logits - wide).pow(2).mean().sqrt()
    assert error < 1.5 * (narrow - wide).pow(2).mean().sqrt()  # no further off than transformers in this dtype
    assert logits.dtype == torch.float32


def test_gemma_rounds_the_embedding_scale_to_its_dtype(tmp_path: Path) -> None:
    save_model(make_model("gemma3", hidden_size=40), tmp_path)
    embedding = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).model.embed_tokens
    decoder = load_model(str(tmp_path), dtype="bfloat16", cpu_step="torch").decoder
    assert isinstance(decoder, Decoder)
    assert decoder.config.embedding_scale == 6.3125  # sqrt(40) = 6.3246 in bf16
    rows = decoder.weights.embedding * decoder.config.embedding_scale
    assert torch.equal(rows, embedding(torch.arange(decoder.config.vocab_size)))
