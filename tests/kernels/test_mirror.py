"""Tensors on their way to a GPU and back, with the CPU in the GPU's place."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.mirror import Mirror


def test_views_of_one_memory_stay_so() -> None:
    whole = torch.arange(24, dtype=torch.float32)
    column, tail, other = whole.view(4, 6)[:, 2], whole[20:], torch.zeros(3, dtype=torch.int64)
    mirror = Mirror("cpu")
    there = [mirror.reflect(tensor) for tensor in (column, tail, other)]
    assert mirror.reflect(7) == 7
    for tensor, copy in zip((column, tail, other), there, strict=True):
        assert torch.equal(tensor, copy) and tensor.stride() == copy.stride()
    assert there[1].data_ptr() - there[0].data_ptr() == tail.data_ptr() - column.data_ptr()
    there[0].fill_(-1)
    there[2] += 5
    assert column.tolist() == [2, 8, 14, 20] and other.tolist() == [0, 0, 0]
    mirror.bring_back()
    assert column.tolist() == [-1] * 4 and tail.tolist() == [-1, 21, 22, 23] and other.tolist() == [5, 5, 5]
