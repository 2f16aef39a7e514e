"""Checks every memory access of an interpreted Triton kernel, which the interpreter itself does not.

An access must lie inside a tensor that was passed to the launch, and no two programs of a launch may store to one
address. Import it only where TRITON_INTERPRET=1 was set before Triton was imported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from triton.runtime import interpreter


class Violation(Exception):
    """A kernel touched memory that it must not touch."""


class _Launch:
    """What the running launch may touch, and what it has stored."""

    def __init__(self) -> None:
        self.starts = np.zeros(0, np.int64)
        self.ends = np.zeros(0, np.int64)
        self.stored: list[np.ndarray] = []
        self.programs: list[tuple[int, ...]] = []

    def allow(self, arguments: Iterable[Any]) -> None:
        extents = sorted(_extent(tensor) for tensor in arguments if hasattr(tensor, "data_ptr") and tensor.numel())
        self.starts = np.array([start for start, _ in extents], np.int64)
        self.ends = np.maximum.accumulate(np.array([end for _, end in extents], np.int64))

    def check(self, pointers: Any, mask: np.ndarray, access: str) -> np.ndarray:
        addresses = pointers.data[np.broadcast_to(mask, pointers.data.shape)].astype(np.int64)
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        owner = np.searchsorted(self.starts, addresses, side="right") - 1
        outside = (owner < 0) | (addresses + size > self.ends[np.maximum(owner, 0)])
        if outside.any():
            raise Violation(f"{access} outside every tensor of the launch: {outside.sum()} of {addresses.size} lanes")
        return addresses

    def store(self, addresses: np.ndarray, program: tuple[int, ...]) -> None:
        if np.unique(addresses).size != addresses.size:
            raise Violation("one store writes an address twice")
        self.stored.append(addresses)
        self.programs.append(program)

    def check_races(self, kernel: str) -> None:
        if not self.stored:
            return
        numbers = {program: number for number, program in enumerate(dict.fromkeys(self.programs))}
        owners = [np.full(len(a), numbers[p]) for a, p in zip(self.stored, self.programs, strict=True)]
        address, owner = np.concatenate(self.stored), np.concatenate(owners)
        order = np.lexsort((owner, address))
        address, owner = address[order], owner[order]
        races = int(((address[1:] == address[:-1]) & (owner[1:] != owner[:-1])).sum())
        if races:
            raise Violation(f"{kernel}: {races} addresses are stored by two programs")


def _extent(tensor: Any) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Launches inside are checked; raises Violation from the launch."""
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, store = builder.create_masked_load, builder.create_masked_store
    initialise, call = executor._init_args_hst, executor.__call__
    launch = _Launch()

    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        launch.check(pointers, mask.data, "load")
        return load(self, pointers, mask, *rest, **options)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        launch.store(launch.check(pointers, mask.data, "store"), tuple(self.grid_idx))
        return store(self, pointers, value, mask, *rest, **options)

    def checked_initialise(self: Any, arguments: Any, options: Any) -> Any:
        result = initialise(self, arguments, options)
        launch.allow([*result[0], *result[1].values()])
        return result

    def checked_call(self: Any, *arguments: Any, **options: Any) -> Any:
        launch.stored, launch.programs = [], []
        result = call(self, *arguments, **options)
        launch.check_races(self.fn.__name__)
        return result

    builder.create_masked_load, builder.create_masked_store = checked_load, checked_store
    executor._init_args_hst, executor.__call__ = checked_initialise, checked_call
    try:
        yield
    finally:
        builder.create_masked_load, builder.create_masked_store = load, store
        executor._init_args_hst, executor.__call__ = initialise, call
