"""The KV cache of 8-bit floats, and caches of more elements than 31 bits count."""

from __future__ import annotations

import mmap

import torch
import triton
import triton.language as tl

from kernels.attention_triton import paged_attention_triton
from kernels.block_copy import copy_blocks_triton
from kernels.float8 import E4M3, _from_cache, to_e4m3
from kernels.rope import rope_and_cache_reference, rope_and_cache_triton
from tests.kernels.attention_cases import build_case, exact_attention


@triton.jit
def _read_kernel(bytes_ptr, out_ptr):  # type: ignore[no-untyped-def]
    code = tl.arange(0, 256)
    tl.store(out_ptr + code, _from_cache(tl.load(bytes_ptr + code), tl.float32))


def test_every_byte_is_read_as_torch_reads_it() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    out = torch.empty(256)
    _read_kernel[(1,)](codes, out)
    torch.testing.assert_close(out, codes.view(E4M3).float(), rtol=0, atol=0, equal_nan=True)


def test_a_cache_of_8_bits_is_written_as_torch_writes_it() -> None:
    """Every number of fp16, NaN and infinities with it, has each code, each half way between two, and both neighbours
    of that; and what is out of range."""
    numbers = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16)
    v = numbers.view(4, 64, 256)
    q, k = torch.randn(4, 16, 256).half(), torch.randn(4, 64, 256).half() * 100
    angles, slots = torch.randn(4, 128), torch.tensor([5, -1, 0, 2])
    caches = []
    for run in (rope_and_cache_triton, rope_and_cache_reference):
        k_cache, v_cache = (torch.zeros(2, 4, 64, 256).to(E4M3) for _ in range(2))
        for at in range(2):  # the second call has the row that the first one does not write
            run(q.clone(), k, v, angles, torch.arange(4), slots.roll(at), k_cache, v_cache)
        caches.append(torch.stack([k_cache.float(), v_cache.float()]))
    torch.testing.assert_close(caches[0][1], caches[1][1], rtol=0, atol=0, equal_nan=True)
    # A rotation may differ in its last place, and then round to the other neighbour.
    assert (caches[0][0] != caches[1][0]).float().mean() < 1e-4
    assert to_e4m3(torch.tensor([1e9, -500.0])).float().tolist() == [448.0, -448.0]


def huge_cache(elements: int, block_size: int, kv_heads: int, head_dim: int) -> torch.Tensor:
    """Zeros that take no memory until they are written."""
    pages = mmap.mmap(-1, elements, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8).view(E4M3).view(-1, block_size, kv_heads, head_dim)


def test_blocks_behind_the_two_thousand_millionth_element() -> None:
    """Written, copied and read where an offset of 32 bits would have wrapped."""
    cache = huge_cache(2**31 + 2**20, 16, 2, 64)
    last = len(cache) - 1
    assert last * 16 * 2 * 64 > 2**31
    case = build_case([(20, 1)], 4, 2, 64, 16, kv_dtype=E4M3)
    angles = torch.cat([torch.ones(20, 32), torch.zeros(20, 32)], dim=1)  # turns by nothing
    slots = torch.tensor([last * 16 + at if at < 16 else at - 16 for at in range(20)])
    rope_and_cache_triton(
        torch.zeros(20, 1, 64), case.keys[0], case.values[0], angles, torch.arange(20), slots, cache, cache
    )
    assert torch.equal(cache[last].float(), case.values[0][:16]) and not cache[1].float().any()
    copy_blocks_triton(
        cache.view(torch.uint8), cache.view(torch.uint8), torch.tensor([last, 0]), torch.tensor([1, last - 1])
    )
    assert torch.equal(cache[1].float(), case.values[0][:16]) and torch.equal(
        cache[last - 1, :4].float(), case.values[0][16:]
    )
    case.batch.block_tables[0, :2] = torch.tensor([last, last - 1])
    out = paged_attention_triton(case.q, cache, cache, case.batch, 0.125)
    case.keys[0] = case.values[0]
    torch.testing.assert_close(out.double(), exact_attention(case, 0.125), rtol=0, atol=5e-6)
