"""`batch-invariant`: what the setting reaches, what it refuses; and the bits of whole runs on the CPU (C26)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kernels
from common.wire import Limits, Result
from executor_svc.model import Decoder, LoadedModel, ModelError, NativeDecoder, load_model
from executor_svc.model import decoder as decoder_module
from executor_svc.model import linear as linear_module
from executor_svc.runner import Runner
from executor_svc.service import StartError, check_batch_invariant
from executor_svc.settings import ExecutorSettings
from kernels import AttentionBatch
from kernels.native.isa import usable_isas
from tests.executor.mini_server import Server, run
from tests.executor.paged_driver import prompt_logits
from tests.executor.plans import new_sequence, prefill_plan
from tests.executor.tiny_models import edit_json, make_model, save_model

PROMPTS = [
    torch.randint(4, 260, (1 + 5 * i % 47,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(32)
]
NEW_TOKENS = 6


def torch_step(folder: Path, **options: Any) -> Decoder:
    decoder = load_model(str(folder), cpu_step="torch", **options).decoder
    assert isinstance(decoder, Decoder)
    return decoder


class TestTheSetting:
    def test_it_is_off_unless_asked_for(self) -> None:
        assert not ExecutorSettings.from_command_line([]).batch_invariant
        assert ExecutorSettings.from_command_line(["--batch-invariant"]).batch_invariant

    @pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
    @pytest.mark.parametrize("wanted", [True, False])
    def test_what_it_reaches(self, family: str, wanted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Every product, the router's and the output layer's among them, and every layer's attention."""
        decoder = torch_step(save_model(make_model(family), tmp_path), batch_invariant=wanted)
        shapes: list[torch.Size] = []
        batches: list[AttentionBatch] = []

        def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            shapes.append(weight.shape)
            return kernels.invariant_linear(x, weight, bias)

        def attention(*arguments: Any, **options: Any) -> torch.Tensor:
            batches.append(arguments[3])
            return kernels.paged_attention(*arguments, **options)

        monkeypatch.setattr(linear_module, "invariant_linear", linear)
        monkeypatch.setattr(decoder_module, "paged_attention", attention)
        monkeypatch.setattr(decoder, "_split_keys", 4096)
        prompt_logits(decoder, PROMPTS[3])
        products = [product.weight.shape for product in decoder.weights.products()]
        assert shapes == (products if wanted else [])
        assert {(batch.invariant, batch.split_keys) for batch in batches} == {(wanted, 4096)}
        assert len(batches) == decoder.config.num_layers

    def test_splits_follow_the_longest_sequence_alone(self, tmp_path: Path) -> None:
        folder = save_model(make_model("llama", max_position_embeddings=65536), tmp_path)
        assert torch_step(folder)._split_keys == 1024
        assert torch_step(folder, max_model_len=32768)._split_keys == 512

    def test_other_bits_are_another_model(self, tmp_path: Path) -> None:
        folder = str(save_model(make_model("llama"), tmp_path))
        cards = [load_model(folder, batch_invariant=flag).card for flag in (True, False, True)]
        assert cards[0].fingerprint == cards[2].fingerprint != cards[1].fingerprint

    @pytest.mark.parametrize("quantization", ["none", "int8"])
    def test_a_cpu_whose_products_depend_on_the_batch_is_refused(
        self, quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        decoder = torch_step(save_model(make_model("llama"), tmp_path), quantization=quantization)
        check_batch_invariant(decoder)
        product = torch.nn.functional.linear
        place = torch.arange(64)[:, None] * 1e-3

        def uneven(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            return product(x, weight, bias) + place[: len(x)]

        monkeypatch.setattr("kernels.linear.F.linear", uneven)
        with pytest.raises(StartError, match=r"^batch-invariant: .*MKL_CBWR"):
            check_batch_invariant(decoder)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"head_dim": 264}, "head_dim is 264"),
        ({"head_dim": 12}, "head_dim is 12"),
        ({"num_attention_heads": 130, "num_key_value_heads": 2, "head_dim": 8}, "num_attention_heads is 130"),
    ],
)
def test_what_a_gpu_s_attention_does_not_serve_is_refused_before_loading(
    changes: dict[str, int], field: str, tmp_path: Path
) -> None:
    """C31. No weight file is there, and no GPU is needed, to be told so; a CPU serves them."""
    save_model(make_model("llama"), tmp_path)
    edit_json(tmp_path / "config.json", changes)
    with pytest.raises(ModelError, match=field):
        load_model(str(tmp_path), device="cuda")
    with pytest.raises(ModelError, match="shape"):
        load_model(str(tmp_path))


Words = list[tuple[int, bytes]]
"""Tokens, each with the bits of its logprob and of those of the likeliest tokens."""


class Recorder(Server):
    """A server that keeps each sequence's logprobs."""

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner)
        self.words: dict[int, Words] = {}

    def take(self, result: Result, sampled: list[int]) -> None:
        super().take(result, sampled)
        found = words_of(result)
        for slot, word in zip(sampled, found, strict=True):
            self.words.setdefault(slot, []).append(word)


def words_of(result: Result) -> Words:
    values = np.split(result.logprobs.values, np.cumsum(result.logprobs.widths))[:-1]
    return [(token, row.tobytes()) for token, row in zip(result.tokens.tolist(), values, strict=True)]


def request(prompt: list[int], **more: Any) -> dict[str, Any]:
    fields = {"tokens": prompt, "temperature": 0.0, "ignore_eos": True, "max_tokens": NEW_TOKENS, "logprobs": 20}
    return fields | more


def serve(
    loaded: LoadedModel, prompts: list[list[int]], *, chunk: int | None = None, block_size: int = 8
) -> list[Words]:
    """All at once."""
    server = Recorder(Runner(loaded.decoder, loaded.card, Limits(block_size, 400, 0, 32, 2048)))
    server.step({slot: request(prompt) for slot, prompt in enumerate(prompts)}, chunk)
    while len(server.ended) < len(prompts):
        server.step()
    return [server.words[slot] for slot in range(len(prompts))]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = save_model(make_model("mistral", sliding_window=8), tmp_path_factory.mktemp("model"))
    found = load_model(str(folder), dtype=request.param, batch_invariant=True)
    assert isinstance(found.decoder, NativeDecoder)
    return found


@pytest.fixture(scope="module")
def solo(loaded: LoadedModel) -> list[Words]:
    return [serve(loaded, [prompt])[0] for prompt in PROMPTS]


@pytest.mark.skipif(not usable_isas(), reason="the native step is not for this machine")
class TestBits:
    @pytest.mark.parametrize("count", [2, 7, 32])
    def test_in_a_batch(self, loaded: LoadedModel, solo: list[Words], count: int) -> None:
        for start in range(0, len(PROMPTS) - count + 1, max(count, 16)):
            assert serve(loaded, PROMPTS[start : start + count]) == solo[start : start + count]

    @pytest.mark.parametrize("chunk", [1, 7, 8])
    def test_in_chunks_and_other_blocks(self, loaded: LoadedModel, solo: list[Words], chunk: int) -> None:
        assert serve(loaded, PROMPTS[:7], chunk=chunk, block_size=4) == solo[:7]

    def test_over_a_prefix_hit(self, loaded: LoadedModel, solo: list[Words]) -> None:
        """Blocks that one sequence filled are another's, nearly all of them beyond the window of 8 tokens (C32)."""
        runner = Runner(loaded.decoder, loaded.card, Limits(8, 400, 0, 32, 2048))
        prompt = next(prompt for prompt in PROMPTS if len(prompt) > 40)
        blocks = list(range(-(-len(prompt) // 8) + 1))
        run(runner, prefill_plan(1, new_sequence(0, blocks=blocks, **request(prompt))))
        for slot, kept in enumerate(range(8, len(prompt), 8), start=1):
            own = [*blocks[: kept // 8], *range(100 + 10 * slot, 107 + 10 * slot)]
            hit = new_sequence(slot, blocks=own[: len(blocks)], computed=kept, **request(prompt))
            (word,) = words_of(run(runner, prefill_plan(slot + 1, hit)))
            assert word == solo[PROMPTS.index(prompt)][0]

    @pytest.mark.parametrize("chunk", [None, 5])
    def test_after_a_preemption(self, loaded: LoadedModel, solo: list[Words], chunk: int | None) -> None:
        """Recomputed from prompt and answer so far, beside others."""
        server = Recorder(Runner(loaded.decoder, loaded.card, Limits(8, 400, 0, 32, 2048)))
        for slot, (prompt, words) in enumerate(zip(PROMPTS[:7], solo, strict=False)):
            known = [*prompt, *(token for token, _ in words[:3])]
            server.step({slot: request(known, prompt_length=len(prompt))}, chunk)
        while len(server.ended) < 7:
            server.step()
        assert [server.words[slot] for slot in range(7)] == [words[3:] for words in solo[:7]]

    def test_the_dtypes_differ(self, loaded: LoadedModel, solo: list[Words]) -> None:
        """So that each is a test of its own; and the texts are worth comparing."""
        assert len({word for words in solo for word in words}) > 3 * len(PROMPTS)
