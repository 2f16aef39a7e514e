"""Which attention the kernels serve: asked by the loader, so that a model is refused before it is loaded."""

from __future__ import annotations

import torch

from kernels.float8 import E4M3

MODEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256
MAX_GROUP = 64


def check_attention_shape(
    head_dim: int,
    heads: int,
    kv_heads: int,
    block_size: int,
    dtype: torch.dtype,
    *,
    kv_dtype: torch.dtype | None = None,
) -> None:
    """Raises ValueError, which names the field, for what `paged_attention` and `rope_and_cache` do not serve.

    heads, kv_heads: of one executor. dtype: of queries, keys and values; kv_dtype: of the cache when it is another.
    """
    if not 8 <= head_dim <= MAX_HEAD_DIM or head_dim % 8:
        raise ValueError(f"head_dim is {head_dim}: attention takes multiples of 8 from 8 to {MAX_HEAD_DIM}")
    if kv_heads < 1:
        raise ValueError(f"kv_heads is {kv_heads}: attention takes at least one")
    if heads < 1 or heads % kv_heads:
        raise ValueError(f"heads is {heads}: attention takes a multiple of the {kv_heads} KV heads")
    if heads // kv_heads > MAX_GROUP:
        raise ValueError(f"heads is {heads}: attention takes at most {MAX_GROUP} for each of the {kv_heads} KV heads")
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}: attention takes at least 1")
    if dtype not in MODEL_DTYPES:
        raise ValueError(f"dtype is {dtype}: attention takes {', '.join(map(str, MODEL_DTYPES))}")
    if kv_dtype not in (None, dtype, E4M3):
        raise ValueError(f"kv_dtype is {kv_dtype}: the cache takes {dtype}, as the model has, or {E4M3}")
