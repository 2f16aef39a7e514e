"""CUDA graphs on the CPU: a recorder whose graphs replay by calling the step again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from executor_svc.inputs import Model


class WatchedModel:
    """A model that remembers where the arguments of its last call lay, and what the host said of them."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.config, self.device, self.dtype = model.config, model.device, model.dtype

    def forward(self, *arguments: Any) -> torch.Tensor:
        token_ids, positions, slots, batch, _, logit_rows = arguments
        tensors = [token_ids, positions, slots, batch.query_start, batch.context_lens, batch.block_tables, logit_rows]
        self.addresses = [(tensor.data_ptr(), tensor.shape, tensor.stride()) for tensor in tensors]
        self.bounds = (batch.max_query_len, batch.max_context_len, batch.num_decodes)
        self.size = len(token_ids), len(logit_rows)
        starts = batch.query_start.tolist()
        assert starts[0] == 0 and starts[-1] == len(token_ids) and starts == sorted(starts), "every token has a row"
        return self._model.forward(*arguments)


class ReplayByCall:
    """What a CUDA graph demands, without one: the same addresses, shapes and host values at every replay, and a result
    that the next replay overwrites."""

    captures = True

    def __init__(self, model: Model) -> None:
        self.model = WatchedModel(model)
        self.recorded: list[int] = []
        """Rows of the graphs of decodes."""
        self.replayed: list[int] = []
        self.recorded_mixed: list[tuple[int, int]] = []
        """Tokens and rows of the others."""
        self.replayed_mixed: list[tuple[int, int]] = []

    def record(self, step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        result = step().clone()
        frozen = self.model.addresses, self.model.bounds
        self._note(self.recorded, self.recorded_mixed)

        def replay() -> torch.Tensor:
            fresh = step()
            assert (self.model.addresses, self.model.bounds) == frozen
            self._note(self.replayed, self.replayed_mixed)
            return result.copy_(fresh)

        return replay

    def _note(self, decodes: list[int], mixed: list[tuple[int, int]]) -> None:
        _, _, num_decodes = self.model.bounds
        if num_decodes:
            decodes.append(num_decodes)
        else:
            mixed.append(self.model.size)
