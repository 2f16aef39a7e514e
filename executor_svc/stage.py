"""Where a plan lies on the device while a CUDA graph reads it: at addresses that never change, filled by one copy."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from executor_svc.transfer import ALIGNMENT, Transfer
from kernels import SamplingColumns
from kernels.batch_inputs import RowInputs, SlotColumns, apply_patches

PATCHES_IN_GRAPH = 1024
"""More than a common iteration asks for: of its decodes one row in `block_size` gets a block, a newcomer has few."""
_WORDS_ALIGNED = ALIGNMENT // 4
Arrays = dict[str, NDArray[np.int32] | NDArray[np.int64]]


class Stage:
    """Named 1-d arrays, int64 or int32, and the patches of a plan behind them."""

    def __init__(self, words: torch.Tensor, padding: Arrays) -> None:
        """words: int32, `words_needed(padding)` and room for patches. padding: the arrays of a plan without work."""
        self._words = words
        self._places: dict[str, tuple[slice, type[np.generic]]] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        start = 0
        for name, array in padding.items():
            place = slice(start, start + array.nbytes // 4)
            self._places[name] = place, array.dtype.type
            self._tensors[name] = words[place].view(torch.int64 if array.dtype == np.int64 else torch.int32)
            start += _aligned(array)
        self._count = words[start : start + 1]
        self._head = start + _WORDS_ALIGNED
        self._patches = words[self._head :].view(-1, 2)
        self._padding = np.zeros(self._head, np.int32)
        for name, array in padding.items():
            self._padding[self._places[name][0]] = array.view(np.int32)
        self._count_at = start

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def clear(self) -> None:
        """Nothing but padding."""
        self._words[: self._head].copy_(torch.from_numpy(self._padding))

    def fill(self, transfer: Transfer, columns: SlotColumns, patches: NDArray[np.int32], arrays: Arrays) -> None:
        """Bring over the fronts of arrays and the patches that go before them; what is behind the fronts is padding.

        The graph applies the first `PATCHES_IN_GRAPH` patches; of more, all are applied to the columns here.
        """
        packed = np.empty(self._head + patches.size, np.int32)
        packed[: self._head] = self._padding
        for name, array in arrays.items():
            place, dtype = self._places[name]
            packed[place].view(dtype)[: len(array)] = array
        packed[self._count_at] = len(patches)
        packed[self._head :] = patches.ravel()
        transfer.fill(self._words, packed)
        if len(patches) > PATCHES_IN_GRAPH:  # whole sequences come in; the graph will patch some words twice
            apply_patches(columns.words, self._patches, self._count)

    def apply_patches(self, columns: SlotColumns) -> None:
        """What a graph does with the patches."""
        apply_patches(columns.words, self._patches[:PATCHES_IN_GRAPH], self._count)


def words_needed(padding: Arrays) -> int:
    """Words of a stage without its patches."""
    return sum(_aligned(array) for array in padding.values()) + _WORDS_ALIGNED


def _aligned(array: NDArray[np.generic]) -> int:
    """Words up to the next array."""
    return -(-array.nbytes // ALIGNMENT) * _WORDS_ALIGNED


def empty_rows(capacity: int, width: int, device: torch.device) -> RowInputs:
    """Zeros, of `capacity` rows with tables of `width` blocks."""

    def out(dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(capacity, dtype=dtype, device=device)

    sampling = SamplingColumns(
        temperature=out(torch.float32),
        top_k=out(torch.int32),
        top_p=out(torch.float32),
        min_p=out(torch.float32),
        seed=out(torch.int64),
        position=out(torch.int64),
    )
    return RowInputs(out(torch.int64), torch.zeros((capacity, width), dtype=torch.int32, device=device), sampling)


def first_rows(rows: RowInputs, count: int) -> RowInputs:
    """Views of the first `count` rows."""
    return RowInputs(rows.token_ids[:count], rows.block_tables[:count], rows.sampling.select(slice(count)))
