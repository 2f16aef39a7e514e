"""Small programs, run once where kernels are loaded: they must compute what torch computes before they are trusted."""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as F

from kernels.attention import AttentionBatch
from kernels.attention_torch import paged_attention_torch
from kernels.native.library import LOGITS, Batch, Kind, Library, Op
from kernels.rms_norm import rms_norm_reference

_INPUTS, _OUTPUTS = 296, 100
"""More inputs than a product takes at once, on any instruction set."""
_FEW, _MANY = 7, 37
"""Rows: products of one block, and of several."""


def self_check(library: Library) -> bool:
    """Whether an embedding, a norm, linear layers of odd sizes and attention come out as in torch, within rounding."""
    return all(_linear_agrees(library, tokens) for tokens in (_FEW, _MANY)) and attention_agrees(library, 64)


def _linear_agrees(library: Library, tokens: int) -> bool:
    embedding, norm, weight = _random(library, (tokens, _INPUTS), (_INPUTS,), (_OUTPUTS, _INPUTS))
    packed = [_packed(library, part) for part in (embedding, weight)]
    rows = torch.arange(tokens)
    logits = torch.empty(tokens, _OUTPUTS)
    embed = Op(kind=Kind.EMBED, output=0, n=tokens, k=_INPUTS, scale=1.0, weight=packed[0].data_ptr())
    normed = Op(kind=Kind.NORM, input=0, output=1, count=1, k=_INPUTS, eps=1e-6, weight=norm.data_ptr())
    linear = Op(kind=Kind.LINEAR, input=1, output=LOGITS, n=_OUTPUTS, k=_INPUTS, scale=1.0, weight=packed[1].data_ptr())
    program = library.program([embed, normed, linear], [_INPUTS, _INPUTS])
    pointers = {"token_ids": rows.data_ptr(), "logits": logits.data_ptr()}
    program.run(Batch(tokens=tokens, taken=tokens, threads=torch.get_num_threads(), **pointers))
    return _agrees(library, logits, F.linear(rms_norm_reference(embedding, norm, 1e-6).float(), weight.float()))


def attention_agrees(library: Library, head_dim: int, window: int = 0) -> bool:
    """Whether attention does: a decode over 300 keys beside a prompt of three tokens, two query heads to a KV head."""
    heads, kv_heads, block_size, tokens, layer = 4, 2, 16, 4, ctypes.c_void_p * 1
    width, blocks = (heads + 2 * kv_heads) * head_dim, 24
    rows, cache_k, cache_v, weight = _random(
        library, (tokens, width), *[(blocks, block_size, kv_heads, head_dim)] * 2, (_OUTPUTS, heads * head_dim)
    )
    tables = torch.stack((torch.arange(blocks - 1, 0, -1)[:19], torch.zeros(19))).int()
    batch = AttentionBatch(torch.tensor([0, 1, 4]).int(), torch.tensor([300, 5]).int(), tables, 3, 300, 1)
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "scale": head_dim**-0.5, "window": window}
    packed = [_packed(library, part) for part in (rows, weight)]
    size = {"n": _OUTPUTS, "k": heads * head_dim}
    ids, logits = torch.arange(tokens), torch.empty(tokens, _OUTPUTS)
    program = library.program(
        [
            Op(kind=Kind.EMBED, output=0, n=tokens, k=width, scale=1.0, weight=packed[0].data_ptr()),
            Op(kind=Kind.ATTENTION, input=0, output=1, **shape),
            Op(kind=Kind.LINEAR, input=1, output=LOGITS, scale=1.0, weight=packed[1].data_ptr(), **size),
        ],
        [width, heads * head_dim],
    )
    k, v = layer(cache_k.data_ptr()), layer(cache_v.data_ptr())
    pointers = {"token_ids": ids, "logits": logits, "block_tables": tables}
    pointers |= {"query_start": batch.query_start, "context_lens": batch.context_lens}
    program.run(
        Batch(
            tokens=tokens,
            rows=2,
            taken=tokens,
            threads=torch.get_num_threads(),
            table_stride=tables.shape[1],
            block_size=block_size,
            num_blocks=blocks,
            k_cache=ctypes.addressof(k),
            v_cache=ctypes.addressof(v),
            **{name: tensor.data_ptr() for name, tensor in pointers.items()},
        )
    )
    queries = rows[:, : heads * head_dim].reshape(tokens, heads, head_dim)
    attended = paged_attention_torch(queries, cache_k, cache_v, batch, head_dim**-0.5, window=window)
    return _agrees(library, logits, F.linear(attended.reshape(tokens, -1).float(), weight.float()))


def _random(library: Library, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(library.dtype) for shape in shapes]


def _packed(library: Library, weight: torch.Tensor) -> torch.Tensor:
    rows, columns = weight.shape
    target = torch.empty(library.packed_size(rows, columns), dtype=library.dtype)
    library.pack(weight, target)
    return target


def _agrees(library: Library, found: torch.Tensor, expected: torch.Tensor) -> bool:
    tolerance = 1e-5 if library.dtype == torch.float32 else 1e-2
    return torch.allclose(found, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))
