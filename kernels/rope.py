"""Rotary position embedding (Su et al., 2021) of queries and keys, fused with the write into the paged KV cache."""

from __future__ import annotations

import torch

from kernels.compiler import power_of_two, tl, triton, use_triton
from kernels.float8 import E4M3, _to_cache, as_bytes, to_e4m3


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
    k_cache, v_cache: [NB, BS, HK, D], contiguous, of one dtype: that of k, or float8_e4m3fn, which takes the values
    rounded to nearest even, those beyond 448 as 448.
    """
    run = rope_and_cache_triton if use_triton(q) else rope_and_cache_reference
    run(q, k, v, cos_sin, positions, slots, k_cache, v_cache)


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
    k = rotate(k.float() if k_cache.dtype == E4M3 else k, angles)  # rounded once
    if bool((slots < 0).any()):
        written = (slots >= 0).nonzero().squeeze(1)
        slots, k, v = slots[written], k[written], v[written]
    for cache, new in ((k_cache, k), (v_cache, v)):
        stored = to_e4m3(new) if cache.dtype == E4M3 else new.to(cache.dtype)
        as_bytes(cache).view(-1, *cache.shape[2:]).index_copy_(0, slots, as_bytes(stored))


@triton.jit
def _rotate_heads(
    source_ptr,
    target_ptr,
    source_stride,
    target_stride,
    cos,
    sin,
    heads,
    head,
    half,
    rest,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
):
    """Rotates heads head .. head + HEADS - 1 from source to target (which may be the same memory)."""
    head = head + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, HALF)[None, :]
    mask = (head < heads) & (column < half)
    source = source_ptr + head * source_stride
    target = target_ptr + head * target_stride
    first = tl.load(source + column, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + half + column, mask=mask, other=0.0).to(tl.float32)
    dtype = target_ptr.dtype.element_ty
    tl.store(target + column, _to_cache(first * cos - second * sin, dtype), mask=mask)
    tl.store(target + half + column, _to_cache(second * cos + first * sin, dtype), mask=mask)
    if REST > 0:
        _copy_heads(source_ptr + 2 * half, target_ptr + 2 * half, source_stride, target_stride, heads, head, rest, REST)


@triton.jit
def _copy_heads(source_ptr, target_ptr, source_stride, target_stride, heads, head, width, WIDTH: tl.constexpr):
    """Copies `width` values of each head; head: int32 [HEADS, 1]."""
    column = tl.arange(0, WIDTH)[None, :]
    mask = (head < heads) & (column < width)
    value = tl.load(source_ptr + head * source_stride + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(target_ptr + head * target_stride + column, _to_cache(value, target_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rope_and_cache_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_sin_ptr,
    positions_ptr,
    slots_ptr,
    k_cache_ptr,
    v_cache_ptr,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    q_heads,
    kv_heads,
    head_dim,
    half,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
):
    """One program a token, HEADS heads at a time. half: R / 2; HALF, REST, HEAD_DIM: powers of two of their widths."""
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + token).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    column = tl.arange(0, HALF)[None, :]
    row = cos_sin_ptr + position * 2 * half
    cos = tl.load(row + column, mask=column < half, other=0.0)
    sin = tl.load(row + half + column, mask=column < half, other=0.0)
    rest = head_dim - 2 * half
    q = q_ptr + token * q_token_stride
    for head in range(0, q_heads, HEADS):
        _rotate_heads(q, q, q_head_stride, q_head_stride, cos, sin, q_heads, head, half, rest, HEADS, HALF, 0)
    if slot >= 0:
        k, v = k_ptr + token * k_token_stride, v_ptr + token * v_token_stride
        k_cache = k_cache_ptr + slot * kv_heads * head_dim
        v_cache = v_cache_ptr + slot * kv_heads * head_dim
        for head in range(0, kv_heads, HEADS):
            _rotate_heads(k, k_cache, k_head_stride, head_dim, cos, sin, kv_heads, head, half, rest, HEADS, HALF, REST)
            heads = head + tl.arange(0, HEADS)[:, None]
            _copy_heads(v, v_cache, v_head_stride, head_dim, kv_heads, heads, head_dim, HEAD_DIM)


def rope_and_cache_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> None:
    """Launches `_rope_and_cache_kernel`."""
    tokens, q_heads, head_dim = q.shape
    if tokens == 0:
        return
    kv_heads, rotary = k.shape[1], cos_sin.shape[1]
    _rope_and_cache_kernel[(tokens,)](
        q,
        k,
        v,
        cos_sin,
        positions,
        slots,
        as_bytes(k_cache),
        as_bytes(v_cache),
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        q_heads,
        kv_heads,
        head_dim,
        rotary // 2,
        HEADS=min(power_of_two(q_heads), 16),
        HEAD_DIM=power_of_two(head_dim),
        HALF=power_of_two(rotary // 2),
        REST=power_of_two(head_dim - rotary) if head_dim > rotary else 0,
        num_warps=4,
    )
