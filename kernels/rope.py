"""Rotary position embedding (Su et al., 2021) of queries and keys, fused with the write into the paged KV cache."""

from __future__ import annotations

import torch


def rope_and_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> None:
    """Rotates `q` in place and writes rotated `k`, and `v`, into the cache. `k` and `v` stay as they are.

    q: [T, HQ, D]; k, v: [T, HK, D]; each may be a strided view of one fused qkv tensor (last dimension contiguous).
    cos_sin: [P, R] fp32, the first R/2 columns cosines, the last R/2 sines; R <= D is the rotary width, the rest of a
    head passes unchanged. Halves are paired as in `rotate_half` of `transformers` (NeoX). The rotation is computed in
    fp32 and rounded once.
    positions: [T] int32 or int64, rows of cos_sin.
    slots: [T] int64, `block * block_size + offset`; -1 writes nowhere.
    k_cache, v_cache: [NB, BS, HK, D], contiguous, of one dtype.
    """
    rope_and_cache_reference(q, k, v, cos_sin, positions, slots, k_cache, v_cache)


def rotate(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """x: [T, heads, D], cos_sin: [T, R] of each token's position. Returns the rotated copy in x's dtype."""
    rotary = cos_sin.shape[-1]
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)
    first, second = x[..., : rotary // 2].float(), x[..., rotary // 2 : rotary].float()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out[..., : rotary // 2] = first * cos - second * sin
    out[..., rotary // 2 : rotary] = second * cos + first * sin
    out[..., rotary:] = x[..., rotary:]
    return out


def rope_and_cache_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> None:
    """Plain torch version of `rope_and_cache`."""
    angles = cos_sin[positions]
    q.copy_(rotate(q, angles))
    k = rotate(k, angles)
    if bool((slots < 0).any()):
        written = (slots >= 0).nonzero().squeeze(1)
        slots, k, v = slots[written], k[written], v[written]
    k_cache.view(-1, *k_cache.shape[2:]).index_copy_(0, slots, k.to(k_cache.dtype))
    v_cache.view(-1, *v_cache.shape[2:]).index_copy_(0, slots, v.to(v_cache.dtype))
