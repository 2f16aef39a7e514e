"""Copy of whole KV blocks inside the cache."""

from __future__ import annotations

import torch

from kernels.compiler import ceil_div, tl, triton, use_triton
from kernels.float8 import as_bytes


def copy_blocks(k_cache: torch.Tensor, v_cache: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
    """Copies block `src[i]` onto block `dst[i]` in both caches.

    k_cache, v_cache: [NB, ...] contiguous, a block in each row; src, dst: [N] int64. A destination appears once, and is
    never also a source of the same call: the copies run in no particular order.
    """
    run = copy_blocks_triton if use_triton(k_cache) else copy_blocks_reference
    run(as_bytes(k_cache), as_bytes(v_cache), src, dst)


def copy_blocks_reference(k_cache: torch.Tensor, v_cache: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
    """Plain torch version of `copy_blocks`."""
    k_cache.index_copy_(0, dst, k_cache.index_select(0, src))
    v_cache.index_copy_(0, dst, v_cache.index_select(0, src))


@triton.jit
def _copy_blocks_kernel(k_cache_ptr, v_cache_ptr, src_ptr, dst_ptr, width, BLOCK: tl.constexpr):
    """One program a copied block and BLOCK of its `width` values."""
    src = tl.load(src_ptr + tl.program_id(0)).to(tl.int64) * width
    dst = tl.load(dst_ptr + tl.program_id(0)).to(tl.int64) * width
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    tl.store(k_cache_ptr + dst + column, tl.load(k_cache_ptr + src + column, mask=mask), mask=mask)
    tl.store(v_cache_ptr + dst + column, tl.load(v_cache_ptr + src + column, mask=mask), mask=mask)


def copy_blocks_triton(k_cache: torch.Tensor, v_cache: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
    """Launches `_copy_blocks_kernel`."""
    width = k_cache[0].numel()
    if len(src):
        grid = (len(src), ceil_div(width, 2048))
        _copy_blocks_kernel[grid](k_cache, v_cache, src, dst, width, BLOCK=2048, num_warps=8)
