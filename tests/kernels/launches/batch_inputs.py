"""What an iteration's inputs are built from."""

from __future__ import annotations

import torch

from kernels.batch_inputs import RowInputs, SlotColumns, apply_patches_triton, gather_rows_triton
from kernels.sampling import SamplingColumns
from tests.kernels.launches.launch import Launch, empty, ints


def _sampling(rows: int) -> SamplingColumns:
    fp32, int32 = torch.float32, torch.int32
    return SamplingColumns(
        temperature=empty(rows, dtype=fp32),
        top_k=ints(rows, dtype=int32),
        top_p=empty(rows, dtype=fp32),
        min_p=empty(rows, dtype=fp32),
        seed=ints(rows),
        position=ints(rows),
    )


def _gather() -> None:
    int32 = torch.int32
    columns = SlotColumns(ints(8, dtype=int32), ints(65, 8192, dtype=int32), ints(65, dtype=int32), _sampling(65))
    rows = RowInputs(ints(8), ints(8, 8192, dtype=int32), _sampling(8))
    gather_rows_triton(columns, ints(8), ints(8, dtype=int32), 16, rows)


LAUNCHES = {
    "patches": Launch(
        lambda: apply_patches_triton(
            ints(1 << 20, dtype=torch.int32), ints(1024, 2, dtype=torch.int32), ints(1, dtype=torch.int32)
        )
    ),
    "rows of slots": Launch(_gather),
}
