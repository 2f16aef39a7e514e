"""Fair service of tenants by virtual token counters (VTC: Sheng et al., Fairness in Serving LLMs, OSDI'24).

Each tenant's counter rises with the service it gets: computed prompt tokens, and generated ones at a higher price, both
divided by its weight. The tenant with the lowest counter is served next. Who comes back after a pause is lifted to the
lowest counter among those that wait, or to what all were charged on average, so that idle time earns no credit.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.sequence import Sequence, State

MAX_IDLE_TENANTS = 4096
"""Counters kept of tenants that neither wait nor run."""


class FairShare:
    """The counters of one model's tenants. Tenants are numbered, so that a lane can charge a column of them at once."""

    def __init__(self, weights: Mapping[str, float], output_token_weight: float) -> None:
        self._weights, self._output_token_weight = weights, output_token_weight
        self._index: dict[str, int] = {}
        self._virtual = np.zeros(16)
        """Virtual tokens by tenant number; they never fall while a tenant is known."""
        self._price = np.ones(16)
        """What one generated token adds."""
        self._free: list[int] = []
        self._waiting: Counter[str] = Counter()
        self._live: Counter[str] = Counter()
        self._lowest: list[tuple[float, str]] = []
        """A heap of tenants that wait, or did; counters in it lag behind."""
        self._listed: set[str] = set()
        """Who is in it."""
        self._last_left = 0.0
        """Counter of the tenant that emptied the queue."""
        self._mean = 0.0
        """What a live tenant was charged on average. New ones begin no lower: were they all to begin at the lowest that
        waits, an endless row of them would keep that where it is, and who was served more would wait for ever."""

    def counter(self, tenant: str) -> float:
        """Virtual tokens of a tenant; 0 for one that is not known."""
        index = self._index.get(tenant)
        return 0.0 if index is None else float(self._virtual[index])

    def index(self, tenant: str) -> int:
        """A tenant's number, given when it is first asked for."""
        index = self._index.get(tenant)
        if index is None:
            index = self._free.pop() if self._free else len(self._index)
            if index == len(self._virtual):
                self._virtual = np.concatenate([self._virtual, np.zeros(index)])
                self._price = np.concatenate([self._price, np.ones(index)])
            self._index[tenant] = index
            self._virtual[index] = 0.0
            self._price[index] = self._output_token_weight / self._weights.get(tenant, 1.0)
        return index

    def enter(self, tenant: str) -> None:
        """A sequence of this tenant begins to wait."""
        index = self.index(tenant)
        if not self._waiting[tenant]:
            floor = self._lowest_waiting()
            self._mean = max(self._mean, self._last_left if floor is None else floor)
            self._virtual[index] = max(self._virtual[index], self._mean)
            if tenant not in self._listed:
                self._listed.add(tenant)
                heapq.heappush(self._lowest, (float(self._virtual[index]), tenant))
        self._waiting[tenant] += 1

    def leave(self, tenant: str) -> None:
        """A sequence of this tenant waits no more."""
        self._waiting[tenant] -= 1
        if not self._waiting[tenant]:
            del self._waiting[tenant]
            self._last_left = self.counter(tenant)

    def begin(self, tenant: str) -> None:
        """A sequence of this tenant came to life."""
        self._live[tenant] += 1

    def end(self, tenant: str) -> None:
        """A sequence of this tenant ended."""
        self._live[tenant] -= 1
        if not self._live[tenant]:
            del self._live[tenant]
            if len(self._index) > 2 * MAX_IDLE_TENANTS + len(self._live):
                self._forget()

    def _forget(self) -> None:
        """Drop those idle tenants that were served least: their return would lift them anyway."""
        idle = sorted((tenant for tenant in self._index if tenant not in self._live), key=self.counter)
        for tenant in idle[:-MAX_IDLE_TENANTS]:
            self._free.append(self._index.pop(tenant))
        self._listed = set(self._waiting)
        self._lowest = [(self.counter(tenant), tenant) for tenant in self._listed]
        heapq.heapify(self._lowest)

    def charge_prompt(self, tenant: str, num_tokens: int) -> None:
        charge = num_tokens / self._weights.get(tenant, 1.0)
        self._virtual[self.index(tenant)] += charge
        self._mean += charge / max(1, len(self._live))

    def charge_generated(self, tenants: NDArray[np.int32]) -> None:
        """One generated token each for these tenant numbers."""
        counts = np.bincount(tenants)
        charges = counts * self._price[: len(counts)]
        self._virtual[: len(counts)] += charges
        self._mean += float(charges.sum()) / max(1, len(self._live))

    def _lowest_waiting(self) -> float | None:
        """The lowest counter among tenants that wait."""
        heap = self._lowest
        while heap:
            known, tenant = heap[0]
            now = self.counter(tenant)
            if tenant not in self._waiting:
                heapq.heappop(heap)
                self._listed.remove(tenant)
            elif now != known:
                heapq.heapreplace(heap, (now, tenant))
            else:
                return now
        return None


class FairQueue:
    """Waiting sequences by rank, then by their tenant's counter, then by arrival.

    A heap of lines, one for each rank and tenant. Counters in it lag behind, but they only rise: a top entry that is
    out of date is put back with what holds now, until the top one is right.
    """

    def __init__(self, share: FairShare) -> None:
        self._share = share
        self._lines: dict[tuple[int, str], list[tuple[int, int, Sequence]]] = {}
        """Heaps by arrival of (sequence number, entry number, sequence)."""
        self._entry_of: dict[int, tuple[int, int]] = {}
        """Sequence number -> (number of its valid entry, its rank then)."""
        self._tops: list[tuple[int, float, int, str, int]] = []
        """A heap of (rank, counter, number of the line's first, tenant, entry number)."""
        self._top_of: dict[tuple[int, str], int] = {}
        """Line -> number of its valid entry among the tops."""
        self._num_entries = 0

    def __len__(self) -> int:
        return len(self._entry_of)

    def __iter__(self) -> Iterator[Sequence]:
        """All members, in no particular order."""
        return (entry[2] for line in self._lines.values() for entry in line if self._is_valid(entry))

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.number in self._entry_of

    def _is_valid(self, entry: tuple[int, int, Sequence]) -> bool:
        return self._entry_of.get(entry[0], (0, 0))[0] == entry[1]

    def add(self, sequence: Sequence) -> None:
        assert sequence.state is State.WAITING
        if sequence in self:
            self.remove(sequence)
        self._num_entries += 1
        self._entry_of[sequence.number] = (self._num_entries, sequence.rank)
        line = self._lines.setdefault((sequence.rank, sequence.tenant), [])
        heapq.heappush(line, (sequence.number, self._num_entries, sequence))
        if self._first(line) is sequence:
            self._put_top(sequence)

    def remove(self, sequence: Sequence) -> None:
        _, rank = self._entry_of.pop(sequence.number)
        place = (rank, sequence.tenant)
        line = self._lines[place]
        if self._first(line) is None:
            del self._lines[place], self._top_of[place]
        elif len(line) > 64 and len(line) > 2 * len(self._entry_of):
            line[:] = [entry for entry in line if self._is_valid(entry)]
            heapq.heapify(line)

    def head(self) -> Sequence | None:
        while self._tops:
            rank, counter, number, tenant, entry = self._tops[0]
            if self._top_of.get((rank, tenant)) != entry:
                heapq.heappop(self._tops)
                continue
            first = self._first(self._lines[rank, tenant])
            assert first is not None
            if (counter, number) == (self._share.counter(tenant), first.number):
                first.key = (rank, counter, number)
                return first
            heapq.heappop(self._tops)
            self._put_top(first)
        return None

    def _put_top(self, first: Sequence) -> None:
        """List a line under its present first member."""
        self._num_entries += 1
        self._top_of[first.rank, first.tenant] = self._num_entries
        counter = self._share.counter(first.tenant)
        heapq.heappush(self._tops, (first.rank, counter, first.number, first.tenant, self._num_entries))
        if len(self._tops) > 64 and len(self._tops) > 2 * len(self._lines):
            self._tops = [top for top in self._tops if self._top_of.get((top[0], top[3])) == top[4]]
            heapq.heapify(self._tops)

    def _first(self, line: list[tuple[int, int, Sequence]]) -> Sequence | None:
        """The first member of a line; what has left before it is dropped."""
        while line and not self._is_valid(line[0]):
            heapq.heappop(line)
        return line[0][2] if line else None
