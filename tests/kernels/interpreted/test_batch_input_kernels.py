"""What an iteration's inputs are built from on the device: the kernels against their references."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernels.batch_inputs import (
    RowInputs,
    SlotColumns,
    apply_patches_reference,
    apply_patches_triton,
    gather_rows_reference,
    gather_rows_triton,
)
from kernels.sampling import SamplingColumns

SLOTS, WIDTH = 7, 1030  # two programs a row of the tables


@pytest.mark.parametrize("count", [0, 1, 256, 300, 301])
def test_patches(count: int) -> None:
    patches = torch.stack((torch.randperm(900)[:300], torch.arange(300) - 150), 1).to(torch.int32).contiguous()
    words = torch.arange(1000, dtype=torch.int32)
    expected = words.clone()
    number = torch.tensor([count], dtype=torch.int32)
    apply_patches_triton(words, patches, number)
    apply_patches_reference(expected, patches, number)
    assert torch.equal(words, expected)
    assert int((words != torch.arange(1000)).sum()) == min(count, 300)


def sampling(rows: int) -> SamplingColumns:
    return SamplingColumns(
        temperature=torch.rand(rows),
        top_k=torch.randint(0, 99, (rows,), dtype=torch.int32),
        top_p=torch.rand(rows),
        min_p=torch.rand(rows),
        seed=torch.randint(-(2**63), 2**63 - 1, (rows,)),
        position=torch.zeros(rows, dtype=torch.int64),
    )


def test_rows_are_gathered_by_slot() -> None:
    """Among them one twice, one without context, and one whose table is full."""
    columns = SlotColumns(
        words=torch.zeros(0, dtype=torch.int32),
        block_tables=torch.randint(0, 1000, (SLOTS, WIDTH), dtype=torch.int32),
        last_token=torch.randint(0, 1000, (SLOTS,), dtype=torch.int32),
        sampling=sampling(SLOTS),
    )
    slots = torch.tensor([3, 0, 6, 6])
    context_lens = torch.tensor([17, 0, WIDTH * 4, 1025 * 4], dtype=torch.int32)

    def run(gather) -> RowInputs:  # type: ignore[no-untyped-def]
        rows = RowInputs(torch.zeros(4, dtype=torch.int64), torch.full((4, WIDTH), -1, dtype=torch.int32), sampling(4))
        gather(columns, slots, context_lens, 4, rows)
        return rows

    found, expected = run(gather_rows_triton), run(gather_rows_reference)
    assert torch.equal(found.token_ids, expected.token_ids)
    for row, used in enumerate((5, 0, WIDTH, 1025)):
        assert torch.equal(found.block_tables[row, :used], expected.block_tables[row, :used])
        assert bool((found.block_tables[row, used:] == -1).all())
    for field in dataclasses.fields(SamplingColumns):
        assert torch.equal(getattr(found.sampling, field.name), getattr(expected.sampling, field.name)), field.name
    assert found.sampling.position.tolist() == context_lens.tolist()
