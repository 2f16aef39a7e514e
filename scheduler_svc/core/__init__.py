"""Pure scheduling: a state machine without I/O, clock or randomness. Time and keys are passed in."""

from scheduler_svc.core.account import account_of
from scheduler_svc.core.attachment import AttachError
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.lane import Lane, LaneError
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence, State, WaitReason

__all__ = [
    "AttachError",
    "Lane",
    "LaneError",
    "Scheduler",
    "SchedulerConfig",
    "Sequence",
    "State",
    "WaitReason",
    "account_of",
]
