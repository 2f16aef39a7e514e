"""The inputs of an iteration, built on the device from what it keeps by slot.

The host sends only changes. What a sequence is (its block table, last token, sampling parameters) stays in columns by
slot; `apply_patches` writes the changes into them, `gather_rows` reads the rows of an iteration out of them. Neither
waits for the host, and both run at fixed shapes and addresses, so a CUDA graph can hold them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.compiler import ceil_div, tl, triton, use_triton
from kernels.sampling import SamplingColumns


@dataclass(frozen=True)
class SlotColumns:
    """Columns by slot, S slots; all are views of `words`, so that one list of patches reaches them all."""

    words: torch.Tensor
    """int32 [W]"""
    block_tables: torch.Tensor
    """int32 [S, MB] contiguous"""
    last_token: torch.Tensor
    """int32 [S], the last known token: the input of the next decode."""
    sampling: SamplingColumns
    """Each [S]; their `position` is not kept."""


@dataclass(frozen=True)
class RowInputs:
    """What `gather_rows` fills, B rows."""

    token_ids: torch.Tensor
    """int64 [B]"""
    block_tables: torch.Tensor
    """int32 [B, MB] contiguous; entries past the context are left as they are."""
    sampling: SamplingColumns
    """Each [B]."""


def apply_patches(words: torch.Tensor, patches: torch.Tensor, count: torch.Tensor) -> None:
    """words[patches[i, 0]] = patches[i, 1] for every i < count.

    words: int32 [W]. patches: int32 [C, 2], contiguous; no index comes twice; what lies at or past `count` is ignored.
    count: int32 [1] on words' device: it may change between replays of a graph. Of a count above C only C are applied.
    """
    run = apply_patches_triton if use_triton(words) else apply_patches_reference
    run(words, patches, count)


def gather_rows(
    columns: SlotColumns, slots: torch.Tensor, context_lens: torch.Tensor, block_size: int, rows: RowInputs
) -> None:
    """Fills `rows` from the columns of `slots`, int64 [B].

    context_lens: int32 [B], tokens that hold KV after the iteration; it bounds what is copied of a block table, and is
    the position of the token to be drawn.
    """
    run = gather_rows_triton if use_triton(slots) else gather_rows_reference
    run(columns, slots, context_lens, block_size, rows)


def apply_patches_reference(words: torch.Tensor, patches: torch.Tensor, count: torch.Tensor) -> None:
    """Plain torch version of `apply_patches`."""
    used = patches[: int(count)]
    words[used[:, 0].long()] = used[:, 1]


def gather_rows_reference(
    columns: SlotColumns, slots: torch.Tensor, context_lens: torch.Tensor, block_size: int, rows: RowInputs
) -> None:
    """Plain torch version of `gather_rows`."""
    rows.token_ids.copy_(columns.last_token[slots])
    rows.block_tables.copy_(columns.block_tables[slots])
    rows.sampling.position.copy_(context_lens)
    for name in ("temperature", "top_k", "top_p", "min_p", "seed"):
        getattr(rows.sampling, name).copy_(getattr(columns.sampling, name)[slots])


@triton.jit(do_not_specialize=["capacity"])
def _patch_kernel(words_ptr, patches_ptr, count_ptr, capacity, BLOCK: tl.constexpr):
    """One program for BLOCK patches; those past the count do nothing."""
    patch = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = patch < tl.minimum(tl.load(count_ptr), capacity)
    index = tl.load(patches_ptr + 2 * patch, mask=mask, other=0).to(tl.int64)
    value = tl.load(patches_ptr + 2 * patch + 1, mask=mask, other=0)
    tl.store(words_ptr + index, value, mask=mask)


def apply_patches_triton(words: torch.Tensor, patches: torch.Tensor, count: torch.Tensor) -> None:
    """Launches `_patch_kernel`."""
    if len(patches):
        _patch_kernel[(ceil_div(len(patches), 256),)](words, patches, count, len(patches), BLOCK=256, num_warps=4)


@triton.jit(do_not_specialize=["width"])
def _gather_rows_kernel(
    slots_ptr,
    context_lens_ptr,
    tables_ptr,
    last_token_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seed_ptr,
    token_ids_out,
    tables_out,
    temperature_out,
    top_k_out,
    top_p_out,
    min_p_out,
    seed_out,
    position_out,
    width,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a row and BLOCK entries of its table; the first one of a row copies its scalars too."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    slot = tl.load(slots_ptr + row)
    context = tl.load(context_lens_ptr + row)
    if part == 0:
        tl.store(token_ids_out + row, tl.load(last_token_ptr + slot).to(tl.int64))
        tl.store(temperature_out + row, tl.load(temperature_ptr + slot))
        tl.store(top_k_out + row, tl.load(top_k_ptr + slot))
        tl.store(top_p_out + row, tl.load(top_p_ptr + slot))
        tl.store(min_p_out + row, tl.load(min_p_ptr + slot))
        tl.store(seed_out + row, tl.load(seed_ptr + slot))
        tl.store(position_out + row, context.to(tl.int64))
    used = (context + BLOCK_SIZE - 1) // BLOCK_SIZE
    entry = part * BLOCK + tl.arange(0, BLOCK)
    block = tl.load(tables_ptr + slot * width + entry, mask=entry < used, other=0)
    tl.store(tables_out + row * width + entry, block, mask=entry < used)


def gather_rows_triton(
    columns: SlotColumns, slots: torch.Tensor, context_lens: torch.Tensor, block_size: int, rows: RowInputs
) -> None:
    """Launches `_gather_rows_kernel`."""
    width = columns.block_tables.shape[1]
    kept, out = columns.sampling, rows.sampling
    _gather_rows_kernel[(len(slots), ceil_div(width, 1024))](
        slots,
        context_lens,
        columns.block_tables,
        columns.last_token,
        kept.temperature,
        kept.top_k,
        kept.top_p,
        kept.min_p,
        kept.seed,
        rows.token_ids,
        rows.block_tables,
        out.temperature,
        out.top_k,
        out.top_p,
        out.min_p,
        out.seed,
        out.position,
        width,
        BLOCK_SIZE=block_size,
        BLOCK=1024,
        num_warps=4,
    )
