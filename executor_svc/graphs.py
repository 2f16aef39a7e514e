"""CUDA graphs: one launch in place of the hundreds that a forward pass takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from common.wire import Limits

MAX_GRAPH_TOKENS = 512
"""Of more tokens, a decode's one or a chunk's, the device has so much to do that the launches hide behind it."""
FEW_ROWS = 64
"""Of a mixed iteration: for so many the output layer is bound by its weight, and more would be computed in vain."""

Step = Callable[[], torch.Tensor]


class Recorder(Protocol):
    """Makes a step replayable."""

    captures: bool
    """Whether a step is worth recording: a replay is cheaper than a call."""

    def record(self, step: Step) -> Step:
        """A step that does the same with what its inputs then hold.

        Inputs and result keep their addresses; the next replay of any step of this recorder overwrites the result.
        """


class Eager:
    """Records nothing: every step is called."""

    captures = False

    def record(self, step: Step) -> Step:
        return step


class SharedResult:
    """One tensor that all recorded steps leave their result in: one of its own would stay alive with each of them."""

    def __init__(self) -> None:
        self._rows: torch.Tensor | None = None

    def like(self, result: torch.Tensor) -> torch.Tensor:
        """The first rows of the tensor, as many as `result` has. Of the largest result there must be one first."""
        if self._rows is None:
            self._rows = torch.empty_like(result)
        if len(result) > len(self._rows) or result.shape[1:] != self._rows.shape[1:]:
            raise ValueError(f"a result of shape {list(result.shape)} behind one of {list(self._rows.shape)}")
        return self._rows[: len(result)]


class CudaGraphs:
    """All graphs share one pool of memory, so they need what the largest one needs: record that first."""

    captures = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = None
        self._result = SharedResult()

    def record(self, step: Step) -> Step:
        # Once without capture: compilers and libraries allocate and synchronise at their first call.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            warm = step()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        torch.cuda.synchronize(self._device)
        result = self._result.like(warm)
        del warm
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            result.copy_(step())  # what the step allocates goes back to the pool, for the next graph
        if self._pool is None:
            self._pool = graph.pool()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay


def decode_sizes(limits: Limits) -> list[int]:
    """Row counts of decodes worth a graph, rising: 1, 2, 4, then every 8th, from 256 on every 16th, and the largest.

    A batch runs in the next larger one, with rows that write nowhere.
    """
    most = min(limits.max_num_seqs, limits.max_num_batched_tokens, MAX_GRAPH_TOKENS)
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, MAX_GRAPH_TOKENS + 1, 16)]
    return sorted({size for size in sizes if size < most} | {most})


def mixed_sizes(limits: Limits) -> list[tuple[int, int]]:
    """(tokens, rows) of iterations with prefill worth a graph, rising: every 32nd token count up to 128, then every
    64th, and the largest; each for `FEW_ROWS` and for as many rows as there may be.

    An iteration runs in the first that holds it, with tokens that write nowhere. The rows of the largest are those of
    the largest decode.
    """
    most = min(limits.max_num_batched_tokens, MAX_GRAPH_TOKENS)
    counts = {tokens for tokens in (32, 64, 96, *range(128, MAX_GRAPH_TOKENS, 64)) if tokens < most} | {most}
    rows = {tokens: min(limits.max_num_seqs, tokens) for tokens in counts}
    return sorted({(tokens, min(size, rows[tokens])) for tokens in counts for size in (FEW_ROWS, rows[tokens])})
