"""Copy of whole KV blocks inside the cache."""

from __future__ import annotations

import torch


def copy_blocks(k_cache: torch.Tensor, v_cache: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
    """Copies block `src[i]` onto block `dst[i]` in both caches.

    k_cache, v_cache: [NB, BS, HK, D] contiguous; src, dst: [N] int64. A destination appears once, and is never also
    a source of the same call: the copies run in no particular order.
    """
    copy_blocks_reference(k_cache, v_cache, src, dst)


def copy_blocks_reference(k_cache: torch.Tensor, v_cache: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
    """Plain torch version of `copy_blocks`."""
    k_cache.index_copy_(0, dst, k_cache.index_select(0, src))
    v_cache.index_copy_(0, dst, v_cache.index_select(0, src))
