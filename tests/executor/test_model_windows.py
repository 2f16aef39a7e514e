"""Sliding windows against `transformers`: at once, in chunks, and by decode (C32)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from executor_svc.model import Decoder, ModelError, load_model
from tests.executor.paged_driver import generate, prompt_logits
from tests.executor.tiny_models import edit_json, make_model, save_model

WINDOW, BLOCK_SIZE = 8, 4
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral, all layers": ("mistral", {"sliding_window": WINDOW}),
    "qwen2, upper layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1, "num_hidden_layers": 3},
    ),
    "qwen3, layer types": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "gemma3, pattern": ("gemma3", {"sliding_window": WINDOW, "head_dim": 16}),
}


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Decoder]:
    family, changes = MODELS[request.param]
    model = make_model(family, **changes)
    decoder = load_model(str(save_model(model, tmp_path_factory.mktemp("windows"))), cpu_step="torch").decoder
    assert any(layer.window == WINDOW for layer in decoder.config.layers)
    return model, decoder


def prompts_of_every_length() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(4, 260, (length,), generator=generator).tolist() for length in range(7, 21)]


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 8, 20])
def test_logits_equal_transformers(pair: tuple[PreTrainedModel, Decoder], chunk: int) -> None:
    model, decoder = pair
    prompts = prompts_of_every_length()
    streams = generate(decoder, prompts, 1, chunk=chunk, block_size=BLOCK_SIZE, all_logits=True)
    for prompt, stream in zip(prompts, streams, strict=True):
        with torch.inference_mode():
            reference = model(torch.tensor([prompt])).logits[0]
        assert float((torch.stack(stream.logits) - reference).abs().max()) < 1e-4, f"length {len(prompt)}"


@pytest.mark.parametrize("chunk", [1, 5, 20])
def test_decoding_on_equals_transformers(pair: tuple[PreTrainedModel, Decoder], chunk: int) -> None:
    model, decoder = pair
    prompts = prompts_of_every_length()
    streams = generate(decoder, prompts, 12, chunk=chunk, block_size=BLOCK_SIZE)
    for prompt, stream in zip(prompts, streams, strict=True):
        # The token that follows each token of the text, by one forward pass over all of it.
        with torch.inference_mode():
            reference = model(torch.tensor([stream.tokens])).logits[0].argmax(-1)
        assert stream.generated == reference[len(prompt) - 1 : -1].tolist(), f"length {len(prompt)}"


def test_use_sliding_window_false_is_honoured(tmp_path: Path) -> None:
    model = make_model("qwen2", use_sliding_window=False, sliding_window=WINDOW, max_window_layers=0)
    save_model(model, tmp_path)
    edit_json(tmp_path / "config.json", {"sliding_window": WINDOW}, remove=("layer_types",))
    decoder = load_model(str(tmp_path), cpu_step="torch").decoder
    assert all(layer.window == 0 for layer in decoder.config.layers)
    tokens = list(range(10, 40))
    with torch.inference_mode():
        reference = model(torch.tensor([tokens])).logits[0]
    assert float((prompt_logits(decoder, tokens) - reference).abs().max()) < 1e-4


def test_a_window_that_llama_does_not_have_is_refused(tmp_path: Path) -> None:
    save_model(make_model("llama"), tmp_path)
    edit_json(tmp_path / "config.json", {"sliding_window": WINDOW})
    with pytest.raises(ModelError, match="sliding_window"):
        load_model(str(tmp_path))
    edit_json(tmp_path / "config.json", {"sliding_window": 4096})  # wider than the context: it never acts
    load_model(str(tmp_path))


def test_windows_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    save_model(make_model("qwen2"), tmp_path)
    edit_json(tmp_path / "config.json", {"layer_types": ["sliding_attention"] * 2})
    with pytest.raises(ModelError, match=r"layer_types.*use_sliding_window"):
        load_model(str(tmp_path))
    edit_json(tmp_path / "config.json", {"use_sliding_window": True, "sliding_window": None})
    with pytest.raises(ModelError, match=r"layer_types|sliding_window"):
        load_model(str(tmp_path))
