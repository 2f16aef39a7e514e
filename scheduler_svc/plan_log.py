"""The plan log: who was in each iteration, one JSON object a line. It holds request ids and counts, never tokens."""

from __future__ import annotations

from pathlib import Path

import orjson
import structlog

from common.wire import Plan, Result
from scheduler_svc.core import Lane

log = structlog.get_logger()


class PlanLog:
    """Appends to a file, unbuffered, so that a reader can follow. A full disk ends the log, not the service."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)

    def plan(self, lane: Lane, plan: Plan, now: float) -> None:
        """Called between plan and result. Rows are [slot, name] for decodes, [slot, name, tokens] for prefills."""
        prefills = zip(plan.prefills.tolist(), plan.prefill_lengths.tolist(), strict=True)
        self._write(
            t=round(now, 6),
            lane=lane.name,
            epoch=plan.epoch,
            iteration=plan.iteration,
            decodes=[(slot, _name(lane, slot)) for slot in plan.decodes.tolist()],
            prefills=[(slot, _name(lane, slot), tokens) for slot, tokens in prefills],
        )

    def result(self, lane: Lane, result: Result, now: float) -> None:
        self._write(
            t=round(now, 6),
            lane=lane.name,
            epoch=result.epoch,
            iteration=result.iteration,
            finished=int((result.finish != 0).sum()),
            busy_us=result.busy_us,
            device_us=result.device_us,
        )

    def _write(self, **fields: object) -> None:
        if self._file.closed:
            return
        try:
            self._file.write(orjson.dumps(fields) + b"\n")
        except OSError as error:
            log.error("the plan log cannot be written and is closed", error=str(error))
            self._file.close()

    def close(self) -> None:
        self._file.close()


def _name(lane: Lane, slot: int) -> str:
    sequence = lane.occupant[slot]
    return f"{sequence.request_id}/{sequence.stream}" if sequence is not None else "?"
