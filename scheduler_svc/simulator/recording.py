"""What a simulation writes down: columns by request and by iteration, never an object a token."""

from __future__ import annotations

from array import array

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.simulator.fairness import FairnessMeter
from scheduler_svc.simulator.histogram import LogHistogram
from scheduler_svc.simulator.replica import Replica, Work
from scheduler_svc.simulator.workload import Workload

Floats = NDArray[np.float64]

INTEGERS = (
    "lane",
    "rows",
    "useful",
    "decodes",
    "prefill_tokens",
    "decode_context",
    "prefill_attention",
    "swapped_blocks",
    "waiting",
    "used_blocks",
    "held_positions",
    "written_positions",
)


class Iterations:
    """Columns by iteration, in the order in which they were planned."""

    def __init__(self) -> None:
        self._start, self._seconds = array("d"), array("d")
        self._integers = {name: array("q") for name in INTEGERS}

    def append(self, start: float, seconds: float, **values: int) -> None:
        self._start.append(start)
        self._seconds.append(seconds)
        for name, column in self._integers.items():
            column.append(values[name])

    def __len__(self) -> int:
        return len(self._start)

    @property
    def start(self) -> Floats:
        return np.array(self._start)

    @property
    def seconds(self) -> Floats:
        return np.array(self._seconds)

    def column(self, name: str) -> NDArray[np.int64]:
        """One of `INTEGERS`."""
        return np.array(self._integers[name], np.int64)


class Recording:
    """One run over one workload."""

    def __init__(self, workload: Workload, weights: Floats, output_weight: float) -> None:
        count = len(workload)
        self.workload = workload
        self.submitted_at = np.full(count, np.nan)
        self.first_token_at = np.full(count, np.nan)
        self.last_token_at = np.full(count, np.nan)
        self.generated = np.zeros(count, np.int64)
        self.finished = np.zeros(count, bool)
        self.refused = np.zeros(count, bool)
        self.refusal = ""
        """What the first refused request was told."""
        self.cached = np.full(count, -1, np.int64)
        """Prompt tokens found at the first admission; -1 before."""
        self.iterations = Iterations()
        self.inter_token = LogHistogram()
        self.fairness = FairnessMeter(weights)
        self.recomputed_tokens = 0
        self.preemptions = 0
        self.end = 0.0
        """When the last iteration ended."""
        self.seats = 0
        """Of each lane."""
        self._output_weight = output_weight
        self._reached = np.zeros(count, np.int64)
        """The most tokens of a request that were ever computed."""
        self._waiting = np.zeros(workload.num_tenants, np.int64)

    @property
    def num_waiting(self) -> int:
        return int(self._waiting.sum())

    def submit(self, number: int, now: float) -> None:
        self.submitted_at[number] = now
        self._waiting[self.workload.tenants[number]] += 1

    def refuse(self, number: int, message: str) -> None:
        """The core would not take it, or gave it up."""
        self.refused[number] = True
        self.refusal = self.refusal or message
        self._waiting[self.workload.tenants[number]] -= 1

    def plan(self, lane: int, replica: Replica, work: Work, start: float, seconds: float, used_blocks: int) -> None:
        """An iteration was planned; `replica` stands as after it. `used_blocks` of the lane's pool are held."""
        for _, request in work.left:
            if request >= 0 and not self.finished[request]:
                self.preemptions += 1
                self._waiting[self.workload.tenants[request]] += 1
        for new in work.entered:
            request = new.params.seed
            self._waiting[self.workload.tenants[request]] -= 1
            if self.cached[request] < 0:
                self.cached[request] = new.computed
        self._serve(replica, work)
        resident = replica.num_blocks > 0
        self.iterations.append(
            start,
            seconds,
            lane=lane,
            rows=work.num_rows,
            useful=len(work.sampled),
            decodes=len(work.decodes),
            prefill_tokens=work.prefill_tokens,
            decode_context=work.decode_context,
            prefill_attention=work.prefill_attention,
            swapped_blocks=work.swapped_blocks,
            waiting=self.num_waiting,
            used_blocks=used_blocks,
            held_positions=int(replica.num_blocks.sum()) * replica.block_size,
            written_positions=int(replica.computed[resident].sum()),
        )

    def _serve(self, replica: Replica, work: Work) -> None:
        """Count what each tenant gets, and what is computed for a second time."""
        served = np.zeros(len(self._waiting))
        tenants = self.workload.tenants
        for slot, computed, chunk in work.prefills:
            request = int(replica.request[slot])
            fresh = max(0, computed + chunk - max(computed, int(self._reached[request])))
            self.recomputed_tokens += chunk - fresh
            served[tenants[request]] += fresh
        rows = np.concatenate([work.decodes, np.array([slot for slot, _, _ in work.prefills], np.int64)])
        requests = replica.request[rows]
        self._reached[requests] = np.maximum(self._reached[requests], replica.computed[rows])
        if len(served) > 1:
            sampled = tenants[replica.request[work.sampled]]
            served += self._output_weight * np.bincount(sampled, minlength=len(served))
            self.fairness.observe(self._waiting > 0, served)

    def tokens(self, replica: Replica, work: Work, now: float) -> None:
        """An iteration's tokens are there."""
        self.end = now
        requests = replica.request[work.sampled]
        before = self.last_token_at[requests]
        self.inter_token.add(now - before[~np.isnan(before)])
        first = requests[np.isnan(before)]
        self.first_token_at[first] = now
        self.last_token_at[requests] = now
        self.generated[requests] += 1
        self.finished[requests[work.finished]] = True
