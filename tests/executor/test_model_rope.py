"""Rotary scalings against `transformers`, beyond the original length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from executor_svc.model import ModelError, load_model
from executor_svc.model.rope import cos_sin_table, read_rope
from tests.executor.paged_driver import generate, prompt_logits
from tests.executor.tiny_models import edit_json, make_model, save_model

ORIGINAL = 32
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
SCALINGS: dict[str, tuple[dict[str, Any], int]] = {
    "default": ({"rope_type": "default"}, 256),
    "linear": ({"rope_type": "linear", "factor": 4.0}, ORIGINAL),
    "llama3": (LLAMA3, 256),
    "yarn": (YARN, 128),
    "yarn, attention_factor": ({**YARN, "attention_factor": 1.3}, 128),
    "yarn, betas": ({**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}, 128),
    "yarn, mscale": ({**YARN, "mscale": 1.2, "mscale_all_dim": 0.7}, 128),
    "yarn, factor from lengths": ({**YARN, "factor": None}, 128),
    "yarn, length from the config": ({"rope_type": "yarn", "factor": 4.0}, ORIGINAL),
}
"""Scaling and max_position_embeddings."""


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("style", [4, 5])
def test_logits_equal_transformers_beyond_the_original_length(name: str, style: int, tmp_path: Path) -> None:
    scaling, length = SCALINGS[name]
    changes = {"max_position_embeddings": length, "rope_parameters": {**scaling, "rope_theta": 500.0}}
    model = make_model("llama", **changes)
    save_model(model, tmp_path)
    config_file = tmp_path / "config.json"
    if style == 4:
        old = {("type" if key == "rope_type" else key): value for key, value in scaling.items()}
        edit_json(config_file, {"rope_theta": 500.0, "rope_scaling": old}, remove=("rope_parameters",))
    else:
        edit_json(config_file, {"rope_parameters": {**scaling, "rope_theta": 500.0}})
    decoder = load_model(str(tmp_path)).decoder
    tokens = torch.randint(4, 260, (120,), generator=torch.Generator().manual_seed(5)).tolist()
    with torch.inference_mode():
        reference = model(torch.tensor([tokens])).logits[0]
    assert decoder.config.max_model_len >= 128
    assert float((prompt_logits(decoder, tokens, chunk=50) - reference).abs().max()) < 1e-4


def test_dynamic_equals_transformers_decoding_past_the_original_length(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 500.0}
    model = make_model("llama", max_position_embeddings=ORIGINAL, rope_parameters=rope)
    save_model(model, tmp_path)
    decoder = load_model(str(tmp_path)).decoder
    assert decoder.config.max_model_len == 4 * ORIGINAL
    prompt = torch.randint(4, 260, (20,), generator=torch.Generator().manual_seed(6)).tolist()
    out = model.generate(torch.tensor([prompt]), max_new_tokens=90, do_sample=False)
    (stream,) = generate(decoder, [prompt], 90, chunk=7, block_size=16)
    assert stream.generated == out[0, 20:].tolist()


def test_dynamic_does_not_depend_on_chunks(tmp_path: Path) -> None:
    """A prompt past the original length is rotated as `transformers` does when it is fed token by token."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 500.0}
    model = make_model("llama", max_position_embeddings=ORIGINAL, rope_parameters=rope)
    save_model(model, tmp_path)
    decoder = load_model(str(tmp_path)).decoder
    tokens = torch.randint(4, 260, (60,), generator=torch.Generator().manual_seed(7)).tolist()
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        reference = torch.cat([model(torch.tensor([[t]]), past_key_values=cache).logits[0] for t in tokens])
    for chunk in (1, 7, 60):
        assert float((prompt_logits(decoder, tokens, chunk=chunk) - reference).abs().max()) < 1e-4


@pytest.mark.parametrize("style", [4, 5])
@pytest.mark.parametrize("length", [ORIGINAL, 128])
def test_longrope_by_the_served_length(style: int, length: int, tmp_path: Path) -> None:
    """Short factors up to the original length; beyond it the long ones, which `transformers` takes for long texts."""
    factors = {"short_factor": [1.0 + 0.1 * n for n in range(12)], "long_factor": [1.5 + 0.5 * n for n in range(12)]}
    rope = {"rope_type": "longrope", "rope_theta": 500.0, "partial_rotary_factor": 0.75, **factors}
    lengths = {"max_position_embeddings": 128, "original_max_position_embeddings": ORIGINAL}
    model = make_model("phi3", rope_parameters=rope, sliding_window=None, **lengths)
    save_model(model, tmp_path)
    if style == 4:
        old = {"rope_theta": 500.0, "partial_rotary_factor": 0.75, "rope_scaling": {"type": "su", **factors}}
        edit_json(tmp_path / "config.json", {**old, **lengths}, remove=("rope_parameters",))
    decoder = load_model(str(tmp_path), max_model_len=length).decoder
    tokens = torch.randint(4, 260, (length,), generator=torch.Generator().manual_seed(8)).tolist()
    with torch.inference_mode():
        reference = model(torch.tensor([tokens])).logits[0]
    for chunk in (7, length):
        assert float((prompt_logits(decoder, tokens, chunk=chunk) - reference).abs().max()) < 1e-4


@pytest.mark.parametrize("style", [4, 5])
def test_gemma_scales_full_layers_only(style: int, tmp_path: Path) -> None:
    linear = {"rope_type": "linear", "factor": 8.0}
    full = {**linear, "rope_theta": 5000.0}
    sliding = {"rope_type": "default", "rope_theta": 200.0}
    ropes = {"full_attention": full, "sliding_attention": sliding}
    model = make_model("gemma3", head_dim=16, sliding_window=8, rope_parameters=ropes)
    save_model(model, tmp_path)
    if style == 4:
        old = {"rope_theta": 5000.0, "rope_local_base_freq": 200.0, "rope_scaling": linear, "sliding_window_pattern": 2}
        gone = ("rope_parameters", "layer_types", "_sliding_window_pattern")
        edit_json(tmp_path / "config.json", old, remove=gone)
    decoder = load_model(str(tmp_path)).decoder
    assert len({layer.rope for layer in decoder.config.layers}) == 2
    tokens = torch.randint(4, 260, (60,), generator=torch.Generator().manual_seed(8)).tolist()
    with torch.inference_mode():
        reference = model(torch.tensor([tokens])).logits[0]
    assert float((prompt_logits(decoder, tokens) - reference).abs().max()) < 1e-4


def test_tables_hold_cosines_then_sines() -> None:
    rope = read_rope({"rope_type": "default"}, "config", 100.0, 64, None)
    table = cos_sin_table(rope, 4, 3)
    angles = torch.arange(3.0)[:, None] * torch.tensor([1.0, 0.1])
    torch.testing.assert_close(table, torch.cat((angles.cos(), angles.sin()), 1))


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, "rope_type.*'longrope'"),
        ({"type": "su", "factor": 2.0}, "rope_type.*'su'"),
        ({"rope_type": "linear"}, "factor: is missing"),
        ({"rope_type": "linear", "factor": "2"}, "factor"),
        ({"rope_type": "linear", "factor": float("nan")}, "factor"),
        ({"rope_type": "dynamic", "factor": 0.0}, "factor"),
        ({"rope_type": "yarn"}, "factor: is missing"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_type": "default", "mrope_section": [8, 8, 8]}, "mrope_section"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 3}, "beta_fast"),
        ({**LLAMA3, "high_freq_factor": 1.0}, "high_freq_factor"),
        ({key: value for key, value in LLAMA3.items() if key != "low_freq_factor"}, "low_freq_factor"),
        ({"rope_type": "default", "rope_theta": -1.0}, "rope_theta"),
    ],
)
def test_what_is_not_done_is_refused_by_name(rope: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=f"config.json: rope_parameters: {named}"):
        read_rope(rope, "config.json: rope_parameters", 10_000.0, 64, None)
