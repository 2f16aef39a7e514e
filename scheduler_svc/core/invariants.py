"""What always holds of the core's state (DESIGN section 4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler_svc.core.sequence import State

if TYPE_CHECKING:
    from scheduler_svc.core.scheduler import Scheduler


def check_books(scheduler: Scheduler, turn: int | None) -> None:
    """Raise AssertionError unless membership, limits and conservation hold. `turn`: as for the scheduler's method."""
    availability = scheduler.availability
    lanes = list(scheduler.lanes.values())
    for lane in lanes if turn is None or not lanes else [lanes[turn % len(lanes)]]:
        lane.check_invariants()
    for lane in lanes:
        is_served = any(not o.spare and not o.draining for o in availability.lanes_of(lane.model.name))
        assert lane.stands_by == (lane.spare and not lane.draining and is_served), "a spare stands by beside others"
        assert lane.draining or not (lane.stays or lane.must_empty)
    scheduler.handovers.check_invariants(scheduler.lanes)
    waiting = [s for queue in scheduler.queues.values() for s in queue]
    running = [s for lane in scheduler.lanes.values() for s in lane.running()]
    assert all(s.state is State.WAITING and s.lane is None for s in waiting)
    assert len({id(s) for s in waiting + running}) == len(waiting) + len(running), "a sequence in two places"
    for model, queue in scheduler.queues.items():
        sizes = [lane.num_kv_tokens for lane in availability.admitting(model)]
        assert queue.room == max(sizes, default=queue.room)
        assert all((s.max_length - 1 > queue.room) == (s in queue.beyond) for s in queue)
        held = availability.holds_larger(model)
        assert held or not len(queue.beyond), "too large for every lane, and nothing ends the wait"
        assert availability.kv_capacity[model] <= queue.room or held
    live = {id(s) for s in scheduler.live.values()}
    fenced = {id(s) for s in running if s.aborted}
    assert {id(s) for s in waiting + running} == live | fenced and not live & fenced, "a sequence is lost"
    assert {id(s) for group in scheduler.by_request.values() for s in group.values()} == live
    for lane in scheduler.lanes.values():
        swapped = [s.swapped for s in waiting if s.swapped is not None and s.swapped.lane is lane]
        lane.host.check_invariants([kv.blocks for kv in swapped])
    assert all(s.swapped is None for s in running)
