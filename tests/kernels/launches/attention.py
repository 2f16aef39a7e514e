"""Paged attention, the rotary embedding that writes the cache, and the copy of blocks."""

from __future__ import annotations

import torch

from kernels.attention import AttentionBatch
from kernels.attention_triton import paged_attention_triton
from kernels.block_copy import copy_blocks_triton
from kernels.rope import rope_and_cache_triton
from tests.kernels.launches.launch import CHIPS, Launch, empty, ints

FLOAT8 = torch.float8_e4m3fn


def attention(
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    decodes: int = 4,
    chunks: int = 0,
    block_size: int = 16,
    window: int = 0,
    softcap: float = 0.0,
    sinks: bool = False,
    invariant: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    table_width: int = 64,
    chips: tuple[str, ...] = CHIPS,
    **spills: int,
) -> Launch:
    rows = decodes + chunks
    q = empty(decodes + 128 * chunks, heads, head_dim, dtype=dtype)
    cache = empty(64, block_size, kv_heads, head_dim, dtype=kv_dtype or dtype)
    sink = empty(heads) if sinks else None

    def run() -> None:
        batch = AttentionBatch(
            query_start=ints(rows + 1, dtype=torch.int32),
            context_lens=ints(rows, dtype=torch.int32),
            block_tables=ints(rows, table_width, dtype=torch.int32),
            max_query_len=128 if chunks else 1,
            max_context_len=0,
            num_decodes=decodes,
            invariant=invariant,
        )
        paged_attention_triton(q, cache, cache, batch, 0.1, window=window, softcap=softcap, sinks=sink)

    return Launch(run, frozenset({"_attention_kernel"} if dtype != torch.float32 else ()), spills, chips)


def rope(head_dim: int, rotary: int, kv_dtype: torch.dtype = torch.bfloat16, chips: tuple[str, ...] = CHIPS) -> Launch:
    qkv = empty(4, 32 + 8 + 8, head_dim)
    q, k, v = qkv.split([32, 8, 8], dim=1)
    cache = empty(64, 16, 8, head_dim, dtype=kv_dtype)
    angles = empty(4096, rotary, dtype=torch.float32)
    return Launch(lambda: rope_and_cache_triton(q, k, v, angles, ints(4), ints(4), cache, cache), chips=chips)


# Budgets of bytes spilled, measured: on sm_80 e4m3 is unpacked in registers; on sm_100 eight warps of 64 columns are
# held to 128 registers, a little less than they need.
LAUNCHES = {
    "decode bf16 9/3x64": attention(9, 3, 64, chips=("gfx942",)),
    "decode bf16 32/8x128": attention(32, 8, 128),
    "decode bf16 32/8x128 walk": attention(32, 8, 128, table_width=8192, chips=("sm_90",)),
    "decode bf16 4/1x256 window": attention(4, 1, 256, window=512, chips=("sm_80", "gfx942")),
    "decode bf16 64/8x64 window sinks": attention(64, 8, 64, window=128, sinks=True, chips=("sm_100",)),
    "decode bf16 28/4x80 softcap": attention(28, 4, 80, softcap=50.0, block_size=32, chips=("sm_80",)),
    "decode bf16 48/1x192": attention(48, 1, 192, chips=("sm_80",)),
    "decode bf16 32/8x128 fp8": attention(32, 8, 128, kv_dtype=FLOAT8, chips=("sm_80", "gfx942"), sm_80=8),
    "decode fp32 8/4x256": attention(8, 4, 256, dtype=torch.float32, chips=("sm_80",)),
    "mixed bf16 9/3x96": attention(9, 3, 96, chunks=2, chips=("gfx942",)),
    "mixed bf16 32/8x128": attention(32, 8, 128, chunks=2),
    "mixed bf16 32/8x128 walk": attention(32, 8, 128, chunks=2, table_width=32768, chips=("sm_90",)),
    "mixed bf16 4/1x256 window": attention(4, 1, 256, chunks=2, window=512, chips=("sm_80", "gfx942")),
    "mixed bf16 64/8x64 window sinks": attention(
        64, 8, 64, chunks=2, window=128, sinks=True, chips=("sm_100",), sm_100=24
    ),
    "mixed bf16 32/8x128 fp8": attention(32, 8, 128, chunks=2, kv_dtype=FLOAT8, chips=("sm_80", "sm_90"), sm_80=64),
    "mixed fp32 8/4x256 softcap": attention(8, 4, 256, chunks=2, softcap=50.0, dtype=torch.float32, chips=("sm_80",)),
    "invariant bf16 32/8x128": attention(32, 8, 128, chunks=2, invariant=True, chips=("sm_80", "sm_90", "gfx942")),
    "invariant bf16 4/1x256 window": attention(4, 1, 256, chunks=2, window=512, invariant=True, chips=("sm_80",)),
    "invariant bf16 64/8x64 window sinks": attention(
        64, 8, 64, chunks=2, window=128, sinks=True, invariant=True, chips=("sm_90", "sm_100")
    ),
    "rope 128": rope(128, 128),
    "rope 128 fp8": rope(128, 128, FLOAT8, chips=("sm_80", "gfx942")),
    "rope 96, 32 rotary": rope(96, 32, chips=("sm_90",)),
    "copy_blocks": Launch(lambda: copy_blocks_triton(empty(8, 16, 8, 128), empty(8, 16, 8, 128), ints(2), ints(2))),
}
