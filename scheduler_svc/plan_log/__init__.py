"""The plan log: every input of the scheduling core and every plan it made, so that a run can be played again.

It is written by `RecordedScheduler` into the segments of a `PlanLog`, and read by `reader` and `player`.
"""

from scheduler_svc.plan_log.recorder import RecordedScheduler
from scheduler_svc.plan_log.writer import PlanLog

__all__ = ["PlanLog", "RecordedScheduler"]
