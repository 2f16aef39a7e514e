"""The step benchmark keeps running as the executor changes, and its floor is the work that the steps cannot avoid."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import step_time
from benchmarks.shapes import NAMES, random_weights, read_shape
from benchmarks.steps import Case, work

FIGURES = ("ms_min", "memory_floor_ms", "compute_floor_ms", "ratio", "bandwidth_gb_s", "matmul_gflop_s")


@pytest.mark.nightly
def test_each_case_that_fits_gives_a_line_of_figures(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")  # torch is loaded: too late for the command to choose
    flags = ["--shape", "embedded", "--dtype", "float32", "--batches", "1,2", "--contexts", "16,100000"]
    flags += ["--prefills", "20", "--rounds", "2", "--steps", "3", "--kv-gib", "0.1", "--json"]
    assert step_time.main(flags) == 0
    told = capsys.readouterr()
    lines = [json.loads(line) for line in told.out.splitlines()]
    assert [(line["kind"], line["batch"], line["context"], line["steps"]) for line in lines] == [
        ("decode", 1, 16, 6),
        ("decode", 2, 16, 6),
        ("prefill", 1, 20, 2),
    ]
    for line in lines:
        assert all(line[name] > 0 for name in FIGURES) and line["ms_min"] <= line["ms_median"]
        assert line["floor_ms"] == max(line["memory_floor_ms"], line["compute_floor_ms"])
    assert told.err.count("left out") == 2


@pytest.mark.parametrize("name", NAMES)
def test_every_shape_is_one_that_the_executor_takes(name: str) -> None:
    config = read_shape(name, "bfloat16", 40_000)
    assert config.max_model_len == 40_000 and not config.ignored_fields


def test_a_tied_output_layer_is_read_once_and_an_embedding_not_at_all() -> None:
    config = read_shape("embedded", "bfloat16", 64)
    _, size = random_weights(config, torch.device("cpu"))
    norms = (2 * config.num_layers + 1) * config.hidden_size
    assert size.weight_bytes == 2 * (size.layer_elements + size.head_elements + norms)
    assert size.head_elements == config.vocab_size * config.hidden_size


def test_a_decode_counts_the_keys_of_its_context_and_of_no_more_than_a_window() -> None:
    embedded = read_shape("embedded", "bfloat16", 4096)
    _, size = random_weights(embedded, torch.device("cpu"))
    row = 2 * embedded.num_kv_heads * embedded.head_dim * 2
    found = work(embedded, size, Case("decode", 3, 100), steps=1, kv_itemsize=2)
    assert found.bytes == size.weight_bytes + 3 * 102 * embedded.num_layers * row
    gemma = read_shape("gemma-3-270m", "bfloat16", 4096)
    windows = [layer.window for layer in gemma.layers]
    row = 2 * gemma.num_kv_heads * gemma.head_dim * 2
    found = work(gemma, size, Case("decode", 1, 1000), steps=1, kv_itemsize=2)
    assert found.bytes == size.weight_bytes + row * sum(512 if window else 1002 for window in windows)


def test_a_prefill_computes_what_its_chunks_would() -> None:
    """Attention among n tokens is n(n+1)/2 pairs; a window of w cuts it to w for each token beyond it."""
    config = read_shape("gemma-3-270m", "bfloat16", 4096)
    _, size = random_weights(read_shape("embedded", "bfloat16", 64), torch.device("cpu"))
    found = work(config, size, Case("prefill", 1, 700), steps=1, kv_itemsize=2)
    pairs = sum(
        sum(min(position + 1, layer.window or position + 1) for position in range(700)) for layer in config.layers
    )
    products = (size.layer_elements - size.tail_elements) * 700 + size.tail_elements + size.head_elements
    assert found.flops == 2 * products + 4 * config.num_heads * config.head_dim * pairs
