"""How all executors and models stand, for operators."""

from __future__ import annotations

from common.wire import ExecutorAccount, Loss, ModelAccount, Roster
from scheduler_svc.core import Scheduler
from scheduler_svc.membership import Executor, Membership


def roster(number: int, scheduler: Scheduler, membership: Membership, now: float) -> Roster:
    """The answer to the survey of this number."""
    return Roster(
        number,
        executors=tuple(_executor(executor, now) for executor in membership.executors),
        models=tuple(_model(name, scheduler, now) for name in scheduler.availability.models),
        paused=membership.pauses.without({executor.name for executor in membership.executors}),
        losses=tuple(Loss(name, reason, now - at) for name, (reason, at) in membership.losses.items()),
    )


def _executor(executor: Executor, now: float) -> ExecutorAccount:
    lane = executor.lane
    return ExecutorAccount(
        name=executor.name,
        epoch=lane.epoch,
        model=lane.model.name,
        fingerprint=lane.model.fingerprint,
        device=executor.device,
        state=executor.state,
        spare=lane.spare,
        seats=lane.seats,
        running=lane.num_running,
        kv_blocks=lane.pool.num_blocks,
        kv_blocks_used=lane.pool.num_referenced,
        iterations=lane.iteration,
        mean_iteration_s=lane.pace.mean_s,
        slowest_iteration_s=lane.pace.slowest_s,
        deadline_s=0.0 if executor.allowed is None else executor.allowed.seconds,
        in_flight_s=0.0 if lane.in_flight is None else now - lane.in_flight.planned_at,
        attached_s=now - executor.attached_at,
        silent_s=now - executor.alive_at,
    )


def _model(name: str, scheduler: Scheduler, now: float) -> ModelAccount:
    lanes = scheduler.availability.lanes_of(name)
    return ModelAccount(
        name=name,
        offered=scheduler.availability.is_offered(name, now),
        executors=tuple(lane.name for lane in lanes),
        waiting=len(scheduler.queues[name]),
        running=sum(lane.num_running for lane in lanes),
        kv_tokens=scheduler.availability.kv_capacity[name],
    )
