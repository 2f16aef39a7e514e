"""Writes Trace Event Format (the JSON object form), event by event."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TextIO

from scheduler_svc.plan_log.format import Header


class TraceFile:
    """Methods take moments of the log's clock, in seconds; in the file they are microseconds since the log began."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._began: float | None = None
        self._offset = 0.0
        self.num_events = 0

    def set_clock(self, header: Header) -> None:
        """From here on, moments are of the clock of this run; runs are placed by the time of day."""
        began = header.wall_time - header.clock
        if self._began is None:
            self._began = header.wall_time
        self._offset = began - self._began

    def slice(self, name: str, pid: int, tid: int, begun: float, ended: float, **args: object) -> None:
        """Something that lasted."""
        duration = max(0.0, round(self._microseconds(ended) - self._microseconds(begun), 3))
        self._write("X", name, pid, tid, begun, dur=duration, args=args)

    def instant(self, name: str, pid: int, tid: int, now: float, *, scope: str = "t", **args: object) -> None:
        """Something that happened. Scope `t`: on a thread; `p`: to a process."""
        self._write("i", name, pid, tid, now, s=scope, args=args)

    def counter(self, name: str, pid: int, now: float, values: dict[str, int]) -> None:
        self._write("C", name, pid, 0, now, args=values)

    def name_process(self, pid: int, name: str, now: float) -> None:
        self._write("M", "process_name", pid, 0, now, args={"name": name})
        self._write("M", "process_sort_index", pid, 0, now, args={"sort_index": pid})

    def name_thread(self, pid: int, tid: int, name: str, now: float) -> None:
        self._write("M", "thread_name", pid, tid, now, args={"name": name})
        self._write("M", "thread_sort_index", pid, tid, now, args={"sort_index": tid})

    def close(self) -> None:
        """End the document; the file stays open."""
        moment = datetime.fromtimestamp(self._began or 0.0, UTC).isoformat()
        begin = "\n" if self.num_events else '{"traceEvents":['
        self._file.write(f'{begin}],"displayTimeUnit":"ms","otherData":{{"began":"{moment}"}}}}\n')

    def _write(self, phase: str, name: str, pid: int, tid: int, now: float, **fields: object) -> None:
        event = {"ph": phase, "name": name, "pid": pid, "tid": tid, "ts": self._microseconds(now), **fields}
        begin = ",\n" if self.num_events else '{"traceEvents":[\n'
        self._file.write(begin + json.dumps(event, separators=(",", ":")))
        self.num_events += 1

    def _microseconds(self, now: float) -> float:
        return round((now + self._offset) * 1e6, 3)
