"""What a server takes of the machine while it is measured."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import psutil


class Watch:
    """Memory and CPU time of the server's processes, and of everything else, while in its `with` block."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._roots = [psutil.Process(pid) for pid in pids]
        self._peak = 0
        self.figures: dict[str, float] = {}
        """Once the block is left, and where there are processes: CPU seconds, and the peak of their resident memory."""
        self._cpu: dict[int, float] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample_on, daemon=True)

    def __enter__(self) -> Self:
        self._sample()
        self._server_before, self._all_before = sum(self._cpu.values()), _busy_s()
        self._own_before = sum(os.times()[:2])
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._sample()
        server = sum(self._cpu.values()) - self._server_before
        others = _busy_s() - self._all_before - server - (sum(os.times()[:2]) - self._own_before)
        if self._roots:
            self.figures = {"server_cpu_s": server, "other_cpu_s": others, "peak_rss_mib": self._peak / 2**20}

    def _sample_on(self) -> None:
        while not self._stop.wait(0.5):
            self._sample()

    def _sample(self) -> None:
        memory = 0
        for root in self._roots:
            try:
                processes = [root, *root.children(recursive=True)]
            except psutil.Error:
                continue
            for process in processes:
                try:
                    times = process.cpu_times()
                    self._cpu[process.pid] = times.user + times.system
                    memory += process.memory_info().rss
                except psutil.Error:
                    continue
        self._peak = max(self._peak, memory)


def _busy_s() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system)
