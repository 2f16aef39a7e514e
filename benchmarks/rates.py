"""How fast this machine reads memory and multiplies matrices: what the floor of a step is made of.

`RateMeter` measures in a process of its own, where MKL has no branch set: with the reproducible one that the executor
asks for, its products may be many times slower than this CPU's best.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self

import numpy as np
import torch

from executor_svc.determinism import VARIABLE

CPU_BYTES, GPU_BYTES = 256 << 20, 8 << 30
"""Far more than the caches hold."""
PIECES = 4
"""Read one after the other, each timed alone: a short reading is more likely to find the machine quiet."""
CPU_MATRIX, GPU_MATRIX = 1024, 8192


@dataclass(frozen=True, slots=True)
class Rates:
    """bandwidth: bytes read in a second. flops: floating-point operations of a matrix product in a second, where a
    multiplication and an addition are two."""

    bandwidth: float = 0.0
    flops: float = 0.0


class RateMeter:
    """The best rates so far. Measure again in each round, so that a busy neighbour does not lower the floor."""

    def __init__(self, device: str, dtype: str, threads: int) -> None:
        self.best = Rates()
        arguments = ["--device", device, "--dtype", dtype, "--threads", str(threads)]
        environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.rates", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )

    def measure(self) -> Rates:
        """Take a fraction of a second. Raises RuntimeError when the process has ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the process that measures the rates has ended")
        seen = Rates(**json.loads(line))
        self.best = Rates(max(seen.bandwidth, self.best.bandwidth), max(seen.flops, self.best.flops))
        return seen

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()


class Probe:
    """Ways to read memory and to multiply. None is the fastest everywhere: the best of all counts."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._gpu = device.type == "cuda"
        size = GPU_BYTES if self._gpu else CPU_BYTES
        self._pieces = list(torch.zeros(size // 8, dtype=torch.int64, device=device).chunk(PIECES))
        self._pool = ThreadPoolExecutor(torch.get_num_threads())
        self._ones = torch.ones(4096)
        self._edge = GPU_MATRIX if self._gpu else CPU_MATRIX
        self._square = torch.ones(self._edge, self._edge, dtype=dtype, device=device)
        first = {multiply: self._seconds(multiply) for multiply in self._products()}
        # Where a library has no kernel for a dtype, it may take seconds.
        self._multiply = [multiply for multiply, took in first.items() if took < 4 * min(first.values())]

    def measure(self) -> Rates:
        reads: list[Callable[[torch.Tensor], object]] = [torch.sum, _sum_of_floats]
        reads += [_copy_of_half] if self._gpu else [self._product_of_rows, self._in_threads]
        took = [self._seconds(partial(read, piece)) for read in reads for piece in self._pieces]
        products = [self._seconds(multiply) for multiply in self._multiply for _ in range(PIECES)]
        return Rates(self._pieces[0].nbytes / min(took), 2 * self._edge**3 / min(products))

    def _product_of_rows(self, piece: torch.Tensor) -> object:
        return torch.mv(piece.view(torch.float32).view(-1, 4096), self._ones)

    def _in_threads(self, piece: torch.Tensor) -> object:
        return list(self._pool.map(np.bitwise_xor.reduce, np.array_split(piece.numpy(), torch.get_num_threads())))

    def _products(self) -> list[Callable[[], object]]:
        square = self._square
        if self._gpu:
            return [lambda: square @ square]
        # A CPU without units for a narrow dtype multiplies in fp32, and so may a step.
        wide = square.float()
        return [lambda: square @ square, lambda: wide @ wide, lambda: wide.numpy() @ wide.numpy()]

    def _seconds(self, work: Callable[[], object]) -> float:
        self._wait()
        started = time.perf_counter()
        work()
        self._wait()
        return time.perf_counter() - started

    def _wait(self) -> None:
        if self._gpu:
            torch.cuda.synchronize()


def _sum_of_floats(piece: torch.Tensor) -> object:
    return piece.view(torch.float32).sum()


def _copy_of_half(piece: torch.Tensor) -> object:
    """Reads one half and writes the other: as many bytes go by."""
    source, target = piece.chunk(2)
    return target.copy_(source)


def main() -> int:
    """Measure once for each line of the standard input."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    probe = Probe(torch.device(options.device), getattr(torch, options.dtype))
    for _ in sys.stdin:
        seen = probe.measure()
        print(json.dumps({"bandwidth": seen.bandwidth, "flops": seen.flops}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
