"""Copies to the device: what kernels may take for granted of their arguments."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from executor_svc.transfer import ALIGNMENT, Transfer


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 17])
def test_what_is_sent_together_is_aligned(rows: int) -> None:
    # An address that is a multiple of 16 in one iteration and not in the next asks for another variant of a kernel.
    arrays = (
        np.arange(rows, dtype=np.int64),
        np.arange(rows + 1, dtype=np.int32),
        np.arange(2 * rows, dtype=np.int32).reshape(rows, 2),
        np.empty((0, 2), np.int32),
        np.arange(rows, dtype=np.int32)[::-1],
    )
    sent = Transfer(torch.device("cpu")).send_together(*arrays)
    first = sent[0].data_ptr()
    for array, tensor in zip(arrays, sent, strict=True):
        np.testing.assert_array_equal(tensor.numpy(), array)
        assert not tensor.numel() or (tensor.data_ptr() - first) % ALIGNMENT == 0
