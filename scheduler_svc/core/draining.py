"""How a lane that drains is emptied: its sequences are handed over to its peers, or wait again with their tokens."""

from __future__ import annotations

from scheduler_svc.core.handover import Handovers, Transit, Verdict
from scheduler_svc.core.lane import Lane
from scheduler_svc.core.model_queue import ModelQueue
from scheduler_svc.core.sequence import State


def move_away(lane: Lane, peers: list[Lane], queue: ModelQueue, handovers: Handovers, now: float) -> None:
    """Empty an idle lane, as far as its peers have seats and blocks."""
    room = {peer: [len(peer.free_slots), peer.pool.num_available] for peer in peers}
    for sequence in sorted(lane.resident(), key=lambda sequence: sequence.key):
        need = lane.num_blocks_for(sequence.num_tokens + 1)
        place = next((p for p, (s, b) in room.items() if s and need <= b and p.could_hold(sequence)), None)
        if place is None:
            continue
        verdict = handovers.consider(sequence, peers, queue)
        if verdict is Verdict.RECOMPUTE:
            lane.release(sequence, State.WAITING)
            queue.add(sequence, now)
        elif verdict is Verdict.MOVED and sequence.lane is not None:
            place = sequence.lane
        seats, blocks = room[place]
        room[place] = [seats - 1, blocks - need]


def give_back(lane: Lane, peers: list[Lane], queue: ModelQueue, now: float) -> bool:
    """Send a lane's sequences back to the queue, but for those that none of the peers, where there are any, could hold.

    Returns whether there were any.
    """
    leaving = [s for s in lane.resident() if not peers or any(peer.could_hold(s) for peer in peers)]
    for sequence in sorted(leaving, key=lambda sequence: sequence.key):
        lane.release(sequence, State.WAITING)
        queue.add(sequence, now)
    return bool(leaving)


def settle(transit: Transit, queue: ModelQueue, now: float, *, done: bool) -> None:
    """A hand-over has ended: its sequence goes on where it is seated, or waits again."""
    sequence, lane = transit.sequence, transit.target
    if sequence.aborted:
        lane.release(sequence, State.FINISHED)
    elif done:
        lane.arrive(sequence, transit.computed, transit.num_hit)
    else:
        lane.release(sequence, State.WAITING)
        queue.add(sequence, now)
