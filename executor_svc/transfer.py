"""Copies between host and device that neither side waits for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

ALIGNMENT = 16
"""Bytes. Triton compiles a kernel once for pointers that are multiples of it, and once more for any others."""
_TORCH = {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32}


class Transfer:
    """Copies to and from one device. On the CPU nothing is copied."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._on_gpu = device.type == "cuda"

    def send(self, array: NDArray[np.generic]) -> torch.Tensor:
        """The array as a tensor on the device."""
        source = torch.from_numpy(np.ascontiguousarray(array))
        if not self._on_gpu:
            return source
        # torch gives page-locked memory out again only when the copies from it are done.
        return source.pin_memory().to(self.device, non_blocking=True)

    def send_together(self, *arrays: NDArray[np.generic]) -> list[torch.Tensor]:
        """Arrays as tensors on the device, in one copy. Each starts at a multiple of `ALIGNMENT`."""
        sizes = [-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays]
        packed = np.empty(sum(sizes), np.uint8)
        ends = np.cumsum(sizes).tolist()
        for array, size, end in zip(arrays, sizes, ends, strict=True):
            packed[end - size : end - size + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        sent = self.send(packed)
        return [
            sent[end - size : end - size + array.nbytes].view(_TORCH[array.dtype]).view(array.shape)
            for array, size, end in zip(arrays, sizes, ends, strict=True)
        ]

    def fill(self, target: torch.Tensor, array: NDArray[np.generic]) -> None:
        """Write the array to the front of a 1-d tensor of its dtype, which stays where it is."""
        source = torch.from_numpy(np.ascontiguousarray(array))
        if self._on_gpu:
            source = source.pin_memory()
        target[: len(source)].copy_(source, non_blocking=True)

    def fetch(self, *tensors: torch.Tensor) -> Callable[[], list[NDArray[Any]]]:
        """Start to copy tensors to the host. The result waits for them, and returns them as arrays."""
        if not self._on_gpu:
            return lambda: [tensor.numpy() for tensor in tensors]
        copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()

        def wait() -> list[NDArray[Any]]:
            done.synchronize()
            return [copy.numpy() for copy in copies]

        return wait
