"""Does what an operator commands: drain, release and resume executors."""

from __future__ import annotations

import structlog

from common.wire import Action, Command, Outcome, Verdict
from scheduler_svc.core import Scheduler
from scheduler_svc.membership import Executor, Membership

log = structlog.get_logger()


def obey(command: Command, scheduler: Scheduler, membership: Membership, now: float) -> Outcome:
    """Carry out a command. Of a model's executors, those in a state for it; where there are none, it is a conflict.

    A pause outlives the attachment: resume and release end it also for a name that is not attached now.
    """
    action, name = Action(command.action), command.name
    meant = [e for e in membership.executors if (e.lane.model.name if command.of_model else e.name) == name]
    was_paused = action is not Action.DRAIN and _end_pauses(command, membership)
    if not meant and was_paused:
        log.info("commanded by an operator", action=action.name.lower(), absent=name)
        return Outcome(command.number, Verdict.DONE)
    if not meant:
        text = f"no executor of the model {name!r}" if command.of_model else f"no executor named {name!r}"
        return Outcome(command.number, Verdict.UNKNOWN, f"{text} is attached")
    conflicts = {executor: conflict(executor, action) for executor in meant}
    if all(conflicts.values()) and not was_paused:
        return Outcome(command.number, Verdict.CONFLICT, conflicts[meant[0]])
    for executor in meant:
        if not conflicts[executor]:
            _perform(executor, action, scheduler, now)
            if action is Action.DRAIN:
                membership.pauses.add(executor.name, executor.lane.model.name)
            executor.drain_by = now + command.timeout_ms / 1000 if command.timeout_ms else None
            log.info("commanded by an operator", action=action.name.lower(), executor=executor.name)
    membership.models_changed = True
    return Outcome(command.number, Verdict.DONE)


def _end_pauses(command: Command, membership: Membership) -> bool:
    """Forget what is remembered of whom a command means. Returns whether anything was."""
    pauses = membership.pauses
    return pauses.end_of_model(command.name) if command.of_model else pauses.end(command.name)


def conflict(executor: Executor, action: Action) -> str:
    """Why an executor is in no state for an action; empty when it is. To drain one that drains is to drain it."""
    if action is Action.RESUME and not executor.lane.stays:
        return f"executor {executor.name!r} is {executor.state}; one that is draining or paused can be resumed"
    if action is Action.DRAIN and executor.state == "leaving":
        return f"executor {executor.name!r} is leaving"
    return ""


def _perform(executor: Executor, action: Action, scheduler: Scheduler, now: float) -> None:
    match action:
        case Action.DRAIN:
            scheduler.pause(executor.lane, now)
        case Action.RELEASE:
            scheduler.leave(executor.lane, now)
        case Action.RESUME:
            scheduler.resume(executor.lane, now)
            executor.is_at_rest = False
