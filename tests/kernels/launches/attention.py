"""Paged attention, the rotary embedding that writes the cache, and the copy of blocks."""

from __future__ import annotations

import torch

from kernels.attention import AttentionBatch
from kernels.attention_triton import paged_attention_triton
from kernels.block_copy import copy_blocks_triton
from kernels.rope import rope_and_cache_triton
from tests.kernels.launches.launch import Launch, empty, ints

MATRIX = frozenset({"_decode_kernel", "_prefill_kernel"})


def attention(
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    decodes: int = 0,
    chunks: int = 0,
    context: int = 400,
    block_size: int = 16,
    window: int = 0,
    softcap: float = 0.0,
    dtype: torch.dtype = torch.bfloat16,
    spills: dict[str, int] | None = None,
) -> Launch:
    rows = decodes + chunks
    batch = AttentionBatch(
        query_start=ints(rows + 1, dtype=torch.int32),
        context_lens=ints(rows, dtype=torch.int32),
        block_tables=ints(rows, 64, dtype=torch.int32),
        max_query_len=128 if chunks else 1,
        max_context_len=context,
        num_decodes=decodes,
    )
    q = empty(decodes + 128 * chunks, heads, head_dim, dtype=dtype)
    cache = empty(64, block_size, kv_heads, head_dim, dtype=dtype)
    return Launch(
        lambda: paged_attention_triton(q, cache, cache, batch, 0.1, window=window, softcap=softcap),
        MATRIX if dtype != torch.float32 else frozenset(),
        spills or {},
    )


def rope(head_dim: int, rotary: int) -> Launch:
    qkv = empty(4, 32 + 8 + 8, head_dim)
    q, k, v = qkv.split([32, 8, 8], dim=1)
    cache = empty(64, 16, 8, head_dim)
    angles = empty(4096, rotary, dtype=torch.float32)
    return Launch(lambda: rope_and_cache_triton(q, k, v, angles, ints(4), ints(4), cache, cache))


LAUNCHES = {
    "decode bf16 9/3x64": attention(9, 3, 64, decodes=4),
    "decode bf16 32/8x128 split": attention(32, 8, 128, decodes=4, context=9000),
    "decode bf16 4/1x256 window": attention(4, 1, 256, decodes=4, context=9000, window=512),
    "decode fp32 28/4x80 softcap": attention(28, 4, 80, decodes=4, softcap=50.0, block_size=32, dtype=torch.float32),
    # fp32 attention serves tests and comparisons, and has no matrix unit to feed.
    "decode fp32 8/4x256": attention(8, 4, 256, decodes=4, dtype=torch.float32, spills={"sm_80": 16, "sm_90": 16}),
    "prefill bf16 9/3x64": attention(9, 3, 64, chunks=2),
    "prefill bf16 32/8x128": attention(32, 8, 128, chunks=2),
    "prefill bf16 4/1x256 window": attention(4, 1, 256, chunks=2, window=512),
    "prefill fp32 28/4x80 softcap": attention(28, 4, 80, chunks=2, softcap=50.0, block_size=32, dtype=torch.float32),
    "prefill fp32 8/4x256": attention(8, 4, 256, chunks=2, dtype=torch.float32),
    "rope 128": rope(128, 128),
    "rope 96, 32 rotary": rope(96, 32),
    "copy_blocks": Launch(lambda: copy_blocks_triton(empty(8, 16, 8, 128), empty(8, 16, 8, 128), ints(2), ints(2))),
}
