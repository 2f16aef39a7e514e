"""What a plan log says of each iteration, to compare pictures of it with."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from common.wire import Ended, EndReason, Left
from scheduler_svc.core import Sequence
from scheduler_svc.plan_log.format import Kind
from scheduler_svc.plan_log.player import Player

Cell = tuple[str, int, str, int]
"""Request id, index, `decode` or `prefill`, and tokens."""
FINISHED = {EndReason.EOS: Left.EOS, EndReason.STOP_TOKEN: Left.STOP_TOKEN, EndReason.LENGTH: Left.LENGTH}


@dataclass
class LoggedCells:
    """By (epoch, iteration)."""

    cells: dict[tuple[int, int], dict[int, Cell]] = field(default_factory=dict)
    """By slot."""
    finished: dict[tuple[int, int], set[tuple[str, int, Left]]] = field(default_factory=dict)
    preempted: dict[tuple[int, int], set[tuple[str, int]]] = field(default_factory=dict)
    """Those who lost their seat when the iteration was planned."""
    lost: set[tuple[int, int]] = field(default_factory=set)
    """Iterations in flight when their executor was lost."""


def name_of(sequence: Sequence) -> tuple[str, int]:
    return sequence.request_id, sequence.index


def read_cells(path: Path) -> LoggedCells:
    """Play a log."""
    player, found = Player(path), LoggedCells()
    preemptions: dict[int, int] = {}
    known: dict[tuple[int, int], Sequence] = {}
    for step in player.steps():
        lane = step.lane
        if step.kind is Kind.PLAN and step.plan is not None and lane is not None:
            plan, at = step.plan, (step.plan.epoch, step.plan.iteration)
            cells = found.cells[at] = {}
            chunks = zip(plan.prefills.tolist(), plan.prefill_lengths.tolist(), strict=True)
            for kind, slot, tokens in [("decode", s, 1) for s in plan.decodes.tolist()] + [
                ("prefill", s, n) for s, n in chunks
            ]:
                sequence = lane.occupant[slot]
                assert sequence is not None
                cells[slot] = (*name_of(sequence), kind, tokens)
            gone = {
                name_of(s) for s in player.scheduler.live.values() if s.num_preemptions > preemptions.get(s.number, 0)
            }
            if gone:
                found.preempted[at] = gone
        elif step.kind is Kind.APPLY and step.result is not None:
            at = step.result.epoch, step.result.iteration
            endings = [(o, m) for o, m in step.messages if isinstance(m, Ended) and m.reason in FINISHED]
            if endings:
                found.finished[at] = {
                    (*name_of(known[owner, m.stream]), FINISHED[EndReason(m.reason)]) for owner, m in endings
                }
        elif step.kind is Kind.DETACH and step.reason and lane is not None and lane.iteration:
            found.lost.add((lane.epoch, lane.iteration))
        known |= player.scheduler.live
        preemptions = {s.number: s.num_preemptions for s in player.scheduler.live.values()}
    return found
