"""Hand-overs between the model executors of a world: blocks are read and written when a test says so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.wire import Fetch, Lend, Recall, decode, encode
from scheduler_svc.core import Lane

if TYPE_CHECKING:
    from tests.core.world import World


@dataclass
class Fetching:
    """A hand-over that a target has been asked for."""

    source: int
    """Epoch."""
    order: Fetch
    num_there: int = 0
    """Blocks that have come so far."""
    recalled: bool = False


class Fetches:
    """What executors do of hand-overs."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.pending: dict[int, Fetching] = {}
        """Those without an answer, by ticket."""

    def read_orders(self) -> None:
        """What the executors are told beside their plans."""
        world, handovers = self._world, self._world.scheduler.handovers
        orders, handovers.orders = handovers.orders, []
        for sent in orders:
            order, executor = decode(encode(sent)), world.executors[sent.epoch]
            match order:
                case Lend():
                    executor.lent[order.ticket] = order.blocks.tolist()
                case Fetch():
                    (source,) = (e.epoch for e in world.executors.values() if order.ticket in e.lent)
                    self.pending[order.ticket] = Fetching(source, order)
                case Recall() if order.ticket in executor.lent:
                    del executor.lent[order.ticket]
                case Recall() if order.epoch in world.scheduler.lanes:
                    self.pending[order.ticket].recalled = True
        if orders:
            self._note_room()

    def _note_room(self) -> None:
        """Seats and blocks of a hand-over come and go while iterations are in flight."""
        for epoch, outing in self._world.out.items():
            lane = self._world.scheduler.lanes[epoch]
            outing.available_blocks, outing.free_slots = lane.pool.num_available, list(lane.free_slots)

    def come(self, ticket: int, count: int = 1000, *, fail: bool = False) -> None:
        """So many more blocks come. The target answers when it has all, or at once that it failed."""
        world, fetching = self._world, self.pending[ticket]
        source, target = world.executors[fetching.source], world.executors[fetching.order.epoch]
        blocks, lane = fetching.order.blocks.tolist(), world.scheduler.lanes[target.epoch]
        lent = source.lent.get(ticket, []) if fetching.source in world.scheduler.lanes else []
        held = {block for sequence in lane.resident() for block in lane.table(sequence.slot)}
        assert not held & set(blocks), "written while somebody holds it"
        if lane.in_flight is not None:
            read = world.out[lane.epoch].plan.swap_outs[0::2].tolist()
            assert not set(blocks) & set(read), "written while the iteration in flight may still read it"
        for place in range(fetching.num_there, min(len(lent), fetching.num_there + count)):
            target.write(blocks[place], source.kv[lent[place]])
            fetching.num_there += 1
        is_whole = fetching.num_there == len(blocks)
        if not is_whole and not fail and lent and not fetching.recalled:
            return
        del self.pending[ticket]
        done = is_whole and not fail
        if done:
            target.fetched |= set(blocks)
        world.scheduler.fetched(lane, ticket, world.now, done=done, busy_s=0.001)
        self._note_room()
        world.read_outbox(None)

    def finish(self) -> None:
        """All that is under way comes, as far as its source is there."""
        for ticket in list(self.pending):
            self.come(ticket)

    def lose(self, lane: Lane) -> None:
        """A target is gone."""
        self.pending = {ticket: f for ticket, f in self.pending.items() if f.order.epoch != lane.epoch}
