"""The native CPU step: a row's bits hang on it alone; near torch in every dtype; no weight twice; when torch serves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from common.logs import COMPILING
from executor_svc.kv_cache import KVCache
from executor_svc.model import Decoder, NativeDecoder, load_model
from executor_svc.model import native as native_module
from executor_svc.model.native import NativeDecoder as Native
from kernels import AttentionBatch
from kernels.native import build as build_module
from kernels.native.isa import VARIABLE, usable_isas
from kernels.native.library import load
from tests.executor.paged_driver import generate, prompt_logits
from tests.executor.tiny_models import FAMILIES, MORE_FAMILIES, make_model, save_model

pytestmark = pytest.mark.skipif(not usable_isas(), reason="the native step is not for this machine")
LENGTHS = (300, 1, 7, 64, 2, 33, 17)


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(4, 260, (length,), generator=generator).tolist() for length in lengths]


def native(folder: Path, dtype: str, **options: Any) -> NativeDecoder:
    decoder = load_model(str(folder), dtype=dtype, **options).decoder
    assert isinstance(decoder, NativeDecoder)
    return decoder


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES])
def test_near_the_torch_step(family: str, dtype: str, tmp_path: Path) -> None:
    save_model(make_model(family), tmp_path)
    torch_step = load_model(str(tmp_path), dtype=dtype, cpu_step="torch").decoder
    assert isinstance(torch_step, Decoder)
    tokens = prompts()[0][:70]
    expected, found = prompt_logits(torch_step, tokens), prompt_logits(native(tmp_path, dtype), tokens)
    difference = (found - expected).abs().max() / expected.abs().max()
    assert float(difference) < (1e-5 if dtype == "float32" else 3e-2)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_quantised_weights_near_the_torch_step(kind: str, tmp_path: Path) -> None:
    save_model(make_model("phi3"), tmp_path)
    plain, *both = (
        prompt_logits(load_model(str(tmp_path), **options).decoder, prompts()[3])
        for options in ({}, {"quantization": kind}, {"quantization": kind, "cpu_step": "torch"})
    )
    assert float((both[0] - both[1]).abs().max()) < 1e-4
    assert float((both[0] - plain).abs().max()) > 1e-3  # it was rounded at all


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("family", ["smollm", "mistral", "gemma2", "gpt_oss"])
def test_bits_do_not_depend_on_company_chunks_or_threads(family: str, dtype: str, tmp_path: Path) -> None:
    decoder = native(save_model(make_model(family), tmp_path), dtype)
    texts = prompts()
    alone = [generate(decoder, [text], 3, chunk=1000, block_size=16)[0] for text in texts]
    try:
        for count, chunk, block_size, threads in ((7, 9, 8, 1), (2, 64, 5, 2), (7, 1000, 16, 2)):
            torch.set_num_threads(threads)
            together = generate(decoder, texts[:count], 3, chunk=chunk, block_size=block_size)
            for stream, other in zip(together, alone, strict=False):
                assert torch.equal(torch.stack(stream.logits), torch.stack(other.logits)), (count, chunk, threads)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("family", "dtype", "kind"),
    [
        ("llama", "bfloat16", "none"),
        ("qwen3_moe", "bfloat16", "none"),
        ("llama", "float32", "int8"),
        ("llama", "float32", "fp8"),
    ],
)
def test_many_rows_are_each_as_alone(family: str, dtype: str, kind: str, tmp_path: Path) -> None:
    decoder = native(save_model(make_model(family), tmp_path), dtype, quantization=kind)
    texts = prompts(tuple(range(1, 33)))
    together = generate(decoder, texts, 2, chunk=3, block_size=16)
    for text, stream in zip(texts, together, strict=True):
        (alone,) = generate(decoder, [text], 2, chunk=1000, block_size=16)
        assert torch.equal(torch.stack(stream.logits), torch.stack(alone.logits)), len(text)


@pytest.mark.parametrize(("tied", "kind"), [(True, "none"), (False, "none"), (True, "int8")])
def test_no_matrix_is_held_twice(tied: bool, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the decoder holds is one copy of each matrix; what it was given it has let go of."""
    save_model(make_model("llama", tie_word_embeddings=tied), tmp_path)
    given: list[native_module.Weights] = []
    construct = Native.__init__

    def watch(self: Native, config, weights, library) -> None:  # type: ignore[no-untyped-def]
        given.append(weights)
        construct(self, config, weights, library)

    monkeypatch.setattr(Native, "__init__", watch)
    decoder = native(tmp_path, "float32", quantization=kind)
    hidden, inner, vocab, qkv = 64, 96, 512, 128
    layer = hidden * (qkv + hidden + 2 * inner + inner)
    layers = 2 * layer * (1 if kind == "int8" else 4)
    assert decoder.packed_bytes == layers + 4 * vocab * hidden * (1 if tied else 2)
    (weights,) = given
    assert not weights.layers and not weights.embedding.numel() and not weights.lm_head.weight.numel()


def decode_rows(decoder: NativeDecoder, **changes: list[Any]) -> torch.Tensor:
    """The logits of two rows of one token in blocks of four positions, of the batch as `changes` make it."""
    batch: dict[str, list[Any]] = {
        "token_ids": [5, 6],
        "positions": [0, 0],
        "slots": [0, 4],
        "logit_rows": [0, 1],
        "query_start": [0, 1, 2],
        "context_lens": [1, 1],
        "block_tables": [[0], [1]],
    }
    batch |= changes
    cache = KVCache.allocate(decoder.config, 2, 4, decoder.dtype, decoder.device)
    for layer in (*cache.k, *cache.v):
        layer.fill_(float("nan"))
    attention = AttentionBatch(
        query_start=torch.tensor(batch["query_start"], dtype=torch.int32),
        context_lens=torch.tensor(batch["context_lens"], dtype=torch.int32),
        block_tables=torch.tensor(batch["block_tables"], dtype=torch.int32),
        max_query_len=1,
        max_context_len=4,
        num_decodes=len(batch["context_lens"]),
    )
    token_ids, positions, slots, logit_rows = (
        torch.tensor(batch[name]) for name in ("token_ids", "positions", "slots", "logit_rows")
    )
    return decoder.forward(token_ids, positions, slots, attention, cache, logit_rows)


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": [5, 512]},
        {"token_ids": [-1, 5]},
        {"positions": [0, 1 << 40]},
        {"positions": [-1, 0]},
        {"slots": [0, 8]},
        {"slots": [-2, 4]},
        {"logit_rows": [0, 2]},
        {"logit_rows": [0, -1]},
        {"block_tables": [[0], [2]]},
        {"block_tables": [[-1], [1]]},
        {"context_lens": [1, 5]},
        {"context_lens": [1, -1]},
        {"query_start": [0, 1, 3]},
        {"query_start": [0, 2, 1]},
        {"positions": [0]},
        {"slots": [4]},
        {"context_lens": [1]},
        {"block_tables": [[0]]},
    ],
)
def test_an_index_out_of_range_is_an_error_and_no_crash(changes: dict[str, list[Any]], tmp_path: Path) -> None:
    decoder = native(save_model(make_model("llama"), tmp_path), "float32")
    with pytest.raises(IndexError, match=r"out of range|differ in number"):
        decode_rows(decoder, **changes)
    assert decode_rows(decoder).isfinite().all()


def test_a_row_without_context_writes_nothing_and_disturbs_nobody(tmp_path: Path) -> None:
    decoder = native(save_model(make_model("llama"), tmp_path), "float32")
    padded = decode_rows(decoder, slots=[0, -1], context_lens=[1, 0])
    assert torch.equal(padded[0], decode_rows(decoder)[0])
    assert padded.isfinite().all()  # what lies in the cache is NaN: it neither read nor wrote there


class TestTorchServes:
    def served(self, folder: Path, **options: str) -> type:
        return type(load_model(str(folder), **options).decoder)  # type: ignore[arg-type]

    def test_what_is_not_done(self, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        assert self.served(save_model(make_model("llama"), tmp_path), kv_cache_dtype="fp8") is Decoder
        assert "an fp8 KV cache" in capfd.readouterr().err

    def test_when_asked_to(self, tmp_path: Path) -> None:
        assert self.served(save_model(make_model("llama"), tmp_path), cpu_step="torch") is Decoder

    def test_without_a_compiler(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        save_model(make_model("llama"), tmp_path / "model")
        monkeypatch.setenv("CXX", "no-such-compiler")
        monkeypatch.setenv(build_module.CACHE_VARIABLE, str(tmp_path / "empty"))
        load.cache_clear()
        assert self.served(tmp_path / "model") is Decoder
        assert "no C++ compiler" in capfd.readouterr().err

    def test_a_compilation_is_told_and_a_library_that_is_kept_is_not_compiled(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        save_model(make_model("llama"), tmp_path / "model")
        assert self.served(tmp_path / "model") is NativeDecoder
        assert COMPILING not in capfd.readouterr().err
        monkeypatch.setenv(build_module.CACHE_VARIABLE, str(tmp_path / "empty"))
        monkeypatch.setattr(build_module, "FLAGS", (*build_module.FLAGS, "-no-such-flag"))
        load.cache_clear()
        assert self.served(tmp_path / "model") is Decoder
        assert COMPILING in capfd.readouterr().err

    def test_with_an_instruction_set_that_is_not_there(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(VARIABLE, "neon")
        assert self.served(save_model(make_model("llama"), tmp_path)) is Decoder


def test_the_fingerprint_does_not_depend_on_the_step(tmp_path: Path) -> None:
    save_model(make_model("llama"), tmp_path)
    cards = [load_model(str(tmp_path), cpu_step=step).card for step in ("native", "torch")]  # type: ignore[arg-type]
    assert cards[0].fingerprint == cards[1].fingerprint
