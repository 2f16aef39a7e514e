"""The 8-bit float of compressed KV caches and weights: e4m3 of the OCP specification (2023), torch's `float8_e4m3fn`.

Not every chip converts it: sm_80 has no such type, and gfx942 has another one of the same width. So kernels see the
cache as bytes and convert by integer arithmetic, bit for bit as torch does; only reading, which is most of the work,
uses the chip's own instruction where there is one.
"""

from __future__ import annotations

import torch

from kernels.compiler import tl, triton

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Rounded to nearest even; what lies beyond 448 becomes 448, and NaN stays NaN."""
    return x.float().clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """An e4m3 tensor as uint8, any other as it is: torch moves bytes where it has no routine for e4m3."""
    return tensor.view(torch.uint8) if tensor.dtype == E4M3 else tensor


def readable(cache: torch.Tensor) -> torch.Tensor:
    """The cache as the attention kernel takes it on this chip: an e4m3 cache as uint8 where the chip cannot read it."""
    if cache.dtype != E4M3:
        return cache
    target = triton.runtime.driver.active.get_current_target() if cache.device.type != "cpu" else None
    native = target is not None and target.backend == "cuda" and target.arch >= 89
    return cache if native else cache.view(torch.uint8)


@triton.jit
def _e4m3_value(code):
    """The fp32 value of e4m3 codes, given as uint16; exact. NaN is not looked for.

    The 7 bits behind the sign, moved to where fp16 has them, are the number times 2 ** (7 - 15), subnormal or not.
    """
    bits = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
    return bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def _from_cache(value, dtype: tl.constexpr):
    """What was read from a cache, as `dtype`. Bytes are e4m3."""
    if value.dtype == tl.uint8:
        code = value.to(tl.uint16)
        value = tl.where((code & 0x7F) == 0x7F, float("nan"), _e4m3_value(code))
    return value.to(dtype)


@triton.jit
def _to_cache(value, dtype: tl.constexpr):
    """fp32 as the cache's element type; uint8 stands for e4m3, as `to_e4m3` rounds.

    A normal number keeps 3 bits of its mantissa. Below 2 ** -6 the codes are the multiples of 2 ** -9, which is the
    last place of a float at 2 ** 14: so adding that rounds to them.
    """
    if dtype == tl.uint8:
        size = tl.minimum(tl.abs(value), 448.0)
        bits = size.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
        subnormal = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(size < 0.015625, subnormal, normal)
        code = tl.where(value != value, 0x7F, code)
        sign = (value.to(tl.int32, bitcast=True) >> 24) & 0x80
        return (code | sign).to(tl.uint8)
    return value.to(dtype)
