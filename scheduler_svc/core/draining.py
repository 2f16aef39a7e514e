"""How a lane that drains is emptied: its sequences are handed over to its peers, or wait again with their tokens."""

from __future__ import annotations

from scheduler_svc.core.admission import Gate
from scheduler_svc.core.handover import Course, Handovers, Transit
from scheduler_svc.core.lane import Lane
from scheduler_svc.core.model_queue import ModelQueue
from scheduler_svc.core.sequence import Sequence, State, WaitReason


class _Room:
    """What a peer would still admit, beside those that were sent its way already."""

    def __init__(self, peer: Lane, queue: ModelQueue) -> None:
        self._peer, self._gate = peer, Gate(peer, queue.lengths)
        self._seats, self._blocks = len(peer.free_slots), peer.pool.num_available

    def takes(self, sequence: Sequence) -> bool:
        """Whether a sequence of another lane finds a place at once."""
        peer = self._peer
        if not self._seats or peer.num_blocks_for(len(sequence.tokens) + 1) > self._blocks:
            return False
        return self._gate.blocked_by(sequence, peer.prefix_hit(sequence)) is WaitReason.NONE

    def less(self, sequence: Sequence) -> None:
        """A sequence goes there."""
        self._seats -= 1
        self._blocks -= self._peer.num_blocks_for(len(sequence.tokens) + 1)
        self._gate.admitted(self._gate.predicted_length(sequence), len(sequence.tokens))


def move_away(lane: Lane, peers: list[Lane], queue: ModelQueue, handovers: Handovers, now: float) -> None:
    """Empty an idle lane, as far as its peers admit its sequences. The others go on where they are."""
    rooms = {peer: _Room(peer, queue) for peer in peers}
    for sequence in sorted(lane.resident(), key=lambda sequence: sequence.key):
        lane.update_tokens(sequence)
        place = next((peer for peer, room in rooms.items() if room.takes(sequence)), None)
        if place is None:
            continue
        course = handovers.consider(sequence, peers, queue)
        if course is Course.RECOMPUTE:
            lane.release(sequence, State.WAITING)
            queue.add(sequence, now)
        elif course is Course.MOVED and sequence.lane is not None:
            place = sequence.lane
        rooms[place].less(sequence)


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
