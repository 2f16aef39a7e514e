"""Drives the pure core by events under a virtual clock."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from common.wire import Ended, EndReason, Limits, ModelCard, Plan
from scheduler_svc.core import Lane, Scheduler, SchedulerConfig
from scheduler_svc.simulator.cost_model import CostModel
from scheduler_svc.simulator.recording import Recording
from scheduler_svc.simulator.replica import Replica, Work
from scheduler_svc.simulator.workload import VOCABULARY, Workload, tenant_name

MODEL = "virtual"
OWNER = 0


class SimulationError(Exception):
    """The core stands still although requests are live."""


@dataclass(frozen=True, slots=True)
class ExecutorSetup:
    """The virtual executors: `lanes` alike."""

    lanes: int = 1
    blocks: int = 8192
    """KV blocks of each."""
    block_size: int = 16
    host_blocks: int = 0
    seats: int = 256
    """Rows that each can hold; `max_num_seqs` may set fewer."""
    token_limit: int = 1 << 20
    """Tokens that each can compute in an iteration; `max_num_batched_tokens` may set fewer."""


@dataclass(slots=True)
class _Executor:
    lane: Lane
    replica: Replica
    plan: Plan | None = None
    work: Work | None = None


class Simulation:
    """One run. The same arguments give the same recording."""

    def __init__(
        self,
        config: SchedulerConfig,
        setup: ExecutorSetup,
        cost: CostModel,
        workload: Workload,
        make_scheduler: Callable[[SchedulerConfig], Scheduler] = Scheduler,
    ) -> None:
        self._cost, self._workload = cost, workload
        self._scheduler = make_scheduler(config)
        weights = [config.tenant_weights.get(tenant_name(k), 1.0) for k in range(workload.num_tenants)]
        self.recording = Recording(workload, np.array(weights), config.output_token_weight)
        card = ModelCard(MODEL, bytes(16), VOCABULARY, workload.longest, (0,), "virtual")
        limits = Limits(setup.block_size, setup.blocks, setup.host_blocks, setup.seats, setup.token_limit)
        self._executors = []
        for i in range(setup.lanes):
            lane = self._scheduler.attach(f"executor-{i}", card, limits, 0.0)
            self._executors.append(
                _Executor(lane, Replica(lane.epoch, setup.seats, setup.block_size, workload.output_lengths))
            )
        self.recording.seats = min(executor.lane.seats for executor in self._executors)
        self._busy: list[tuple[float, int]] = []
        """A heap of (end of the iteration, index of the executor)."""
        self._next = 0
        """The request that is submitted next."""
        self._out = 0
        """Requests that were submitted and have not ended."""
        self.now = 0.0

    def run(self, progress: Callable[[int, int], None] | None = None) -> Recording:
        """Run until every request has ended. `progress` is told (ended, all) now and then.

        Raises `SimulationError`.
        """
        turns = 0
        while True:
            self._submit_due()
            due = self._scheduler.expire(self.now)
            self._plan_idle()
            self._read_outbox()
            following = self._next_event(due)
            if following is None:
                break
            self.now = following
            while self._busy and self._busy[0][0] <= self.now:
                self._deliver(self._executors[heapq.heappop(self._busy)[1]])
            self._read_outbox()
            turns += 1
            if progress is not None and turns % 256 == 0:
                progress(self._next - self._out, len(self._workload))
        if self._scheduler.live or self._next < len(self._workload):
            reasons = ", ".join(f"{n} by {why.value}" for why, n in self._scheduler.waiting_by_reason().items())
            raise SimulationError(f"nothing runs, and {self._out} requests wait: {reasons}")
        return self.recording

    def _next_event(self, due: float | None) -> float | None:
        times = [self._busy[0][0]] if self._busy else []
        workload = self._workload
        if self._next < len(workload):
            if not workload.concurrency:
                times.append(max(self.now, float(workload.arrivals[self._next])))
            elif self._out < workload.concurrency:
                times.append(self.now)
        if due is not None and due > self.now and self._scheduler.live:
            times.append(due)
        return min(times) if times else None

    def _submit_due(self) -> None:
        workload = self._workload
        while self._next < len(workload):
            if workload.concurrency:
                if self._out >= workload.concurrency:
                    return
            elif workload.arrivals[self._next] > self.now:
                return
            self.recording.submit(self._next, self.now)
            self._out += 1
            self._scheduler.submit(OWNER, workload.submit(self._next, MODEL), self.now)
            self._next += 1

    def _plan_idle(self) -> None:
        for index, executor in enumerate(self._executors):
            if executor.plan is not None:
                continue
            plan = self._scheduler.plan(executor.lane, self.now)
            if plan is None:
                continue
            work = executor.replica.take(plan)
            executor.plan, executor.work = plan, work
            seconds = self._cost.overhead_s + self._cost.seconds(
                len(work.decodes), work.prefill_tokens, work.decode_context, work.prefill_attention, work.swapped_blocks
            )
            pool = executor.lane.pool
            self.recording.plan(index, executor.replica, work, self.now, seconds, pool.num_referenced)
            heapq.heappush(self._busy, (self.now + seconds, index))

    def _deliver(self, executor: _Executor) -> None:
        plan, work = executor.plan, executor.work
        assert plan is not None and work is not None
        executor.plan = executor.work = None
        self.recording.tokens(executor.replica, work, self.now)
        self._scheduler.apply(executor.lane, executor.replica.result(plan, work), self.now)

    def _read_outbox(self) -> None:
        messages, self._scheduler.outbox = self._scheduler.outbox, []
        for _, message in messages:
            if isinstance(message, Ended):
                self._out -= 1
                if message.reason not in (EndReason.LENGTH, EndReason.EOS):
                    self.recording.refuse(message.stream, message.message)
