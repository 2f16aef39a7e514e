"""Weights in eight bits: the right ones, rightly, and not far from the model as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
from tokenizers import Tokenizer

import executor_svc
from executor_svc.model import Decoder, ModelError, load_model
from kernels import quantize_weight
from tests.executor.paged_driver import generate, prompt_logits
from tests.executor.tiny_models import make_model, save_model

Kind = Literal["int8", "fp8"]
KINDS: tuple[Kind, ...] = ("int8", "fp8")
DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
TOKENS = torch.randint(4, 260, (60,), generator=torch.Generator().manual_seed(9)).tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["qwen2", "phi3", "gemma2"])
def test_logits_are_those_of_a_model_with_the_rounded_weights(family: str, kind: Kind, tmp_path: Path) -> None:
    """`transformers` with every linear layer of its decoder rounded, output row by output row, and nothing else."""
    model = make_model(family)
    save_model(model, tmp_path)
    decoder = load_model(str(tmp_path), quantization=kind).decoder
    plain = prompt_logits(load_model(str(tmp_path)).decoder, TOKENS)
    with torch.no_grad():
        for name, module in model.model.named_modules():
            if isinstance(module, torch.nn.Linear):
                quantized, scale = quantize_weight(module.weight, kind)
                module.weight.copy_(quantized.float() * scale[:, None])
                assert name.endswith("proj")
        reference = model(torch.tensor([TOKENS])).logits[0]
    logits = prompt_logits(decoder, TOKENS)
    assert float((logits - reference).abs().max()) < 1e-4
    assert float((logits - plain).abs().max()) > 1e-3  # it was rounded at all


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_stored_in_eight_bits(kind: Kind, tmp_path: Path) -> None:
    save_model(make_model("qwen3"), tmp_path)
    loaded = load_model(str(tmp_path), quantization=kind, cpu_step="torch")
    assert isinstance(loaded.decoder, Decoder)
    weights = loaded.decoder.weights
    assert {linear.weight.dtype for layer in weights.layers for linear in layer.linears()} == {DTYPES[kind]}
    assert weights.embedding.dtype == weights.lm_head.weight.dtype == weights.norm.dtype == torch.float32
    assert loaded.card.dtype == "float32"


@pytest.mark.parametrize("kind", KINDS)
def test_rows_have_the_same_bits_in_any_company_and_in_chunks(kind: Kind, tmp_path: Path) -> None:
    decoder = load_model(str(save_model(make_model("llama"), tmp_path)), quantization=kind).decoder
    prompts = [TOKENS[:length] for length in (1, 9, 60)]
    alone = [generate(decoder, [prompt], 6, chunk=100, block_size=16)[0] for prompt in prompts]
    for stream, other in zip(generate(decoder, prompts, 6, chunk=7, block_size=16), alone, strict=True):
        assert torch.equal(torch.stack(stream.logits), torch.stack(other.logits))


def test_another_fingerprint(tmp_path: Path) -> None:
    save_model(make_model("llama"), tmp_path)
    cards = [load_model(str(tmp_path), quantization=kind).card for kind in ("none", *KINDS)]
    assert len({card.fingerprint for card in cards}) == 3
    assert cards[0].fingerprint == load_model(str(tmp_path)).card.fingerprint


def test_experts_are_refused(tmp_path: Path) -> None:
    save_model(make_model("mixtral"), tmp_path)
    with pytest.raises(ModelError, match="quantization: int8 is not supported for the experts of Mixtral"):
        load_model(str(tmp_path), quantization="int8")


@pytest.mark.parametrize(("kind", "error", "agreement"), [("int8", 0.015, 0.95), ("fp8", 0.06, 0.9)])
def test_the_embedded_model_stays_near(kind: Kind, error: float, agreement: float) -> None:
    """Next tokens and logits over a text, against fp32.

    error: rms of the difference over the spread of the logits. A weight is off by at most 2^-8 of its row's largest
    (int8) or 2^-4 of itself (fp8, three bits of mantissa); seen: 0.006 and 0.026. agreement: positions with the same
    greedy token; the others have two candidates closer together than the error.
    """
    folder = Path(executor_svc.__file__).parent / "default_model"
    text = "Emma Woodhouse, handsome, clever, and rich, with a comfortable home and happy disposition. "
    tokens = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text * 8).ids
    wide, narrow = (
        prompt_logits(load_model(str(folder), dtype="float32", quantization=way).decoder, tokens)
        for way in ("none", kind)
    )
    assert (narrow - wide).pow(2).mean().sqrt() < error * wide.std()
    assert (wide.argmax(-1) == narrow.argmax(-1)).float().mean() > agreement
    assert not torch.equal(narrow, wide)
