"""Why a sequence that has a seat is not in the iteration in flight."""

from __future__ import annotations

from scheduler_svc.core.config import Prefill
from scheduler_svc.core.lane import Lane
from scheduler_svc.core.sequence import Sequence, WaitReason


def why_aside(lane: Lane, sequence: Sequence) -> WaitReason:
    """What keeps a running sequence out of its lane's iteration; NONE when it is in it, or when none is in flight.

    PAUSED while its KV is on its way from another lane.
    """
    if sequence.slot in lane.arriving:
        return WaitReason.PAUSED
    flight = lane.in_flight
    if flight is None:
        return WaitReason.NONE
    if sequence.prefilling:
        planned = any(member is sequence for member, _ in flight.prefills)
        if planned:
            return WaitReason.NONE
        # Where phases are separate it may be the turn of the decodes.
        is_apart = lane.config.prefill is Prefill.SEPARATE and not flight.prefills
        return WaitReason.POLICY if is_apart else WaitReason.TOKEN_BUDGET
    # Only where phases are separate a decode stands aside.
    return WaitReason.NONE if len(flight.decodes) else WaitReason.POLICY
