"""Keeps a ring of iterations while questions about them come, and answers those."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, Protocol

from common.wire import Iterations, Watch
from common.wire.watching import MAX_BLOCKS_SEEN, MAX_ROWS
from scheduler_svc.core import Lane, Scheduler
from scheduler_svc.watching import telling
from scheduler_svc.watching.ring import IterationRing

KEEP_S = 5.0
"""Without a question for so long nobody looks any more."""
MAX_WAITING = 256
MAX_LANES = 256
MAX_BLOCKS = 1 << 14
"""KV blocks told of in one answer, of all lanes together."""
MAX_HOLDERS = 4096
"""Where more sequences run, whose the blocks are is not told: no iteration is to wait for who looks on."""
MAX_NAMES = 1 << 16
"""Sequences named in one answer: to who comes new, many may be new."""


class Attached(Protocol):
    """An executor as the membership knows it."""

    lane: Lane

    @property
    def state(self) -> str: ...


class Watched(Protocol):
    """The membership: it notes in `ring` while there is one."""

    ring: IterationRing | None

    @property
    def executors(self) -> Sequence[Attached]: ...


class Watcher:
    """`answer` begins to watch, `check` ends it: nobody pays for what nobody looks at."""

    def __init__(self, scheduler: Scheduler, membership: Watched, newest: int) -> None:
        """`newest` must be above all numbers of an earlier service's iterations, which pages may still show."""
        self._scheduler, self._membership = scheduler, membership
        self._asked_at = 0.0
        self._newest = newest
        """Of rings that are gone."""

    def check(self, now: float) -> None:
        """Forget everything when nobody has asked for a while."""
        ring = self._membership.ring
        if ring is not None and now - self._asked_at > KEEP_S:
            self._newest, self._membership.ring = ring.newest, None

    def answer(self, question: Watch, now: float) -> Iterations:
        """What is new to the asker. The first question of all finds nothing: noting begins with it."""
        self._asked_at = now
        ring = self._membership.ring
        if ring is None:
            ring = self._membership.ring = IterationRing(self._newest)
        executors = self._membership.executors[:MAX_LANES]
        first, rows, sequences = ring.since(question.after, MAX_ROWS)
        told: dict[str, Any] = telling.columns(rows)
        if question.status:
            told["waiting"] = tuple(islice(telling.waiting(self._scheduler, now), MAX_WAITING))
            told["num_waiting"] = {r.value: n for r, n in self._scheduler.waiting_by_reason().items()}
            most = min(MAX_BLOCKS_SEEN, MAX_BLOCKS // max(1, len(executors)))
            few = sum(executor.lane.num_running for executor in executors) <= MAX_HOLDERS
            told["blocks"] = tuple(telling.blocks(one.lane, most, with_holders=few) for one in executors)
        lanes = [telling.attached(executor.lane, executor.state) for executor in executors]
        lanes += ring.gone_lanes
        return Iterations(
            question.number,
            ring.newest,
            first,
            lanes=tuple(lanes[:MAX_LANES]),
            sequences=tuple(sequences[-MAX_NAMES:]),
            **told,
        )
