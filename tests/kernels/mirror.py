"""Runs the launches of tests that hold their tensors on the CPU on a GPU: there and back, around every launch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from triton.runtime.jit import JITFunction


class Mirror:
    """Copies of tensors on a device. Views of one memory stay views of one memory, at the same distances."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._memories: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def reflect(self, value: Any) -> Any:
        """The copy of a tensor on the CPU; anything else as it is."""
        if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
            return value
        memory = value.untyped_storage()
        if memory.data_ptr() not in self._memories:
            here = torch.empty(0, dtype=torch.uint8).set_(memory)
            self._memories[memory.data_ptr()] = here, here.to(self._device, copy=True)
        there = self._memories[memory.data_ptr()][1].untyped_storage()
        empty = torch.empty(0, dtype=value.dtype, device=self._device)
        return empty.set_(there, value.storage_offset(), value.size(), value.stride())

    def bring_back(self) -> None:
        """What the copies hold now goes into the tensors."""
        for here, there in self._memories.values():
            here.copy_(there)


@contextlib.contextmanager
def installed(device: str = "cuda") -> Iterator[None]:
    """Every kernel launched inside runs on the device."""
    run = JITFunction.run

    def mirrored(self: Any, *arguments: Any, **options: Any) -> Any:
        mirror = Mirror(device)
        there = [mirror.reflect(value) for value in arguments]
        result = run(self, *there, **{name: mirror.reflect(value) for name, value in options.items()})
        mirror.bring_back()
        return result

    JITFunction.run = mirrored
    try:
        yield
    finally:
        JITFunction.run = run
