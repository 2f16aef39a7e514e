"""One iteration of a lane: what is told to the executor beside the work itself, and what is in flight."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from common.wire import NewSequence
from scheduler_svc.core.sequence import Sequence


@dataclass(slots=True)
class InFlight:
    """What was planned and is not yet acknowledged."""

    iteration: int
    decodes: NDArray[np.int64]
    prefills: list[tuple[Sequence, int]]
    """Sequence and chunk length, in plan order."""
    planned_at: float
    num_tokens: int
    swaps_out: bool = False
    """Whether it reads blocks that nobody holds any more."""
    deferred: list[Sequence] = field(default_factory=list)
    """Aborted meanwhile; their slots and blocks are given up at the acknowledgement (the fence)."""


@dataclass(slots=True)
class PlanChanges:
    """What the next plan has to tell the executor beside the work itself."""

    new: list[NewSequence] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)
    appended_slots: list[int] = field(default_factory=list)
    appended_blocks: list[int] = field(default_factory=list)
    swap_outs: list[tuple[int, int]] = field(default_factory=list)
    """(device block, host block)"""
    swap_ins: list[tuple[int, int]] = field(default_factory=list)
    """(host block, device block)"""

    def is_told(self, slot: int) -> bool:
        """Whether the executor knows the occupant of a slot."""
        return all(item.slot != slot for item in self.new)

    def forget(self, slot: int) -> None:
        """A slot is given up before the plan that would have told of it: tell neither."""
        self.new = [item for item in self.new if item.slot != slot]
        kept = [i for i, s in enumerate(self.appended_slots) if s != slot]
        self.appended_slots = [self.appended_slots[i] for i in kept]
        self.appended_blocks = [self.appended_blocks[i] for i in kept]
