"""What must hold of the core after every step, beyond its own `check_invariants` (DESIGN section 4).

Each function raises AssertionError. They recompute from outside what the core decided, by plain rules.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from common.wire import Plan
from scheduler_svc.core import Lane, Sequence, State, WaitReason
from scheduler_svc.core.config import Admission, Batching, Preemption, Prefill
from scheduler_svc.core.planner import MAX_PREFILLS_IN_A_ROW
from scheduler_svc.core.seating import WINDOW

if TYPE_CHECKING:
    from tests.core.world import World


def check_tokens(world: World) -> None:
    """Membership: every live sequence is in one place, and has exactly the tokens that its client knows."""
    live = world.scheduler.live
    world.open = {key for key in world.open if world.streams[key].accepted and not world.streams[key].over}
    assert world.open == live.keys(), "a stream is lost"
    for key, sequence in live.items():
        stream, lane = world.streams[key], sequence.lane
        tokens = sequence.tokens if lane is None else lane.tokens[sequence.slot, : lane.length[sequence.slot]]
        assert tokens.tolist() == stream.prompt + stream.tokens, f"{stream} has other tokens than its client"
        assert (lane is None) == (sequence.state is State.WAITING)
        assert (sequence in world.scheduler.queues[sequence.model]) == (lane is None)


def check_mirror(world: World, lane: Lane) -> None:
    """Conservation: the executor that has just run a plan holds what the lane believes."""
    executor = world.executors[lane.epoch]
    running = {sequence.slot: sequence for sequence in lane.resident()}
    assert executor.rows.keys() == running.keys(), "seats on the executor and in the lane differ"
    for slot, row in executor.rows.items():
        assert row.blocks == lane.table(slot), f"block tables of slot {slot} differ"
        assert row.generation == lane.generation[slot]
    for slots in (world.out[lane.epoch].plan.decodes, world.out[lane.epoch].plan.prefills):
        assert all(not running[slot].aborted for slot in slots.tolist())


def check_seated(world: World, lane: Lane) -> None:
    """Work conserving: who is seated is in the iteration, or stands aside for a reason that is true."""
    plan = world.out[lane.epoch].plan
    members = {*plan.decodes.tolist(), *plan.prefills.tolist()}
    for sequence in lane.running():
        why = world.scheduler.why(sequence)
        if sequence.slot in lane.arriving:
            assert why is WaitReason.PAUSED and sequence.slot not in members
        elif sequence.slot in members:
            assert why is WaitReason.NONE
        elif why is WaitReason.POLICY:
            # Where phases are separate, one of them has the iteration.
            assert world.config.prefill is Prefill.SEPARATE
            assert not len(plan.prefills) if sequence.prefilling else len(plan.prefills)
        else:
            assert why is WaitReason.TOKEN_BUDGET and sequence.prefilling
            assert tokens_are_used_up(world, lane, plan), "a seated sequence waits for tokens that are left"


def tokens_are_used_up(world: World, lane: Lane, plan: Plan) -> bool:
    """Whether an iteration leaves no token to prefill, or none to one that must not be cut."""
    prefill = int(plan.prefill_lengths.sum())
    left = lane.token_budget - len(plan.decodes)
    if world.config.target_itl_ms and len(plan.decodes):
        left = lane.pace.prefill_tokens(len(plan.decodes), left, world.config.target_itl_ms / 1000)
    return prefill >= left or (not world.config.chunked_prefill and len(plan.prefills) > 0)


def check_reasons(world: World) -> None:
    """After a turn: whoever waits does so for a named reason, and beside a lane that is at work."""
    for model in world.scheduler.queues:
        waiting, lanes = world.waiting(model), world.scheduler.availability.lanes_of(model)
        admitting = [lane for lane in lanes if lane.admits]
        leaving = [lane for lane in lanes if lane.epoch in world.leaving]
        for sequence in waiting:
            reason = world.scheduler.why(sequence)
            assert reason is not WaitReason.NONE
            assert (reason is WaitReason.NO_EXECUTOR) == (not lanes)
            assert bool(leaving) or (reason is WaitReason.PAUSED) == (bool(lanes) and not admitting)
        room = max((lane.limits.num_blocks * lane.block_size for lane in admitting), default=0)
        if any(sequence.max_length - 1 <= room for sequence in waiting):
            at_work = any(lane.epoch in world.out or lane.arriving or lane.lent for lane in admitting + leaving)
            assert at_work, "somebody waits and no lane is at work"


def check_full(world: World, lane: Lane, plan: Plan | None, *, preempted: bool) -> None:
    """Work conserving: the next sequence in order has no place in the plan that was just made."""
    if world.config.batching is Batching.REQUEST and lane.epoch in world.closed:
        return
    if plan is not None and len(plan.decodes) and world.prefills_before[lane.epoch] >= MAX_PREFILLS_IN_A_ROW:
        return
    longs = [sequence.rank for sequence in lane.prefilling if sequence.is_long]
    whole_batch = world.config.batching is Batching.REQUEST
    waiting = [
        s for s in world.waiting(lane.model.name) if not s.is_long or not longs or s.rank < min(longs) or whole_batch
    ]
    excused = [_is_excused(world, lane, sequence) for sequence in waiting]
    if all(excused) or excused.index(False) >= WINDOW:
        return
    assert plan is not None or lane.arriving or lane.lent, "a lane is idle and somebody could run"
    head = waiting[excused.index(False)]
    why = world.scheduler.why(head)
    if preempted and world.scheduler.why(world.waiting(lane.model.name)[0]) is WaitReason.KV_BLOCKS:
        return  # What a preemption has just freed is for those that run.
    assert _holds(world, why, lane, plan, head), f"{head.stream} waits for {why}"


def _is_excused(world: World, lane: Lane, sequence: Sequence) -> bool:
    """Whether a lane may pass over a sequence by policy."""
    if sequence.max_length - 1 > lane.limits.num_blocks * lane.block_size:
        return True
    if any(sequence.must_not_run_beside(other) for other in lane.running()):
        return True
    if world.scheduler.why(sequence) is not WaitReason.POLICY:
        return False
    # It may be left to a lane that has not seen it yet, which must be at work, or about to plan in this turn.
    return any(
        peer is not lane and peer.admits and sequence.ticket > peer.last_ticket
        for peer in world.scheduler.availability.lanes_of(lane.model.name)
    )


def _holds(world: World, why: WaitReason, lane: Lane, plan: Plan | None, head: Sequence) -> bool:
    """Whether what is said to keep a sequence out does."""
    match why:
        case WaitReason.SEATS:
            return not lane.free_slots
        case WaitReason.TOKEN_BUDGET:
            return plan is not None and tokens_are_used_up(world, lane, plan)
        case WaitReason.KV_BLOCKS:
            return not _certainly_fits(world, lane, head)
    return False


def _certainly_fits(world: World, lane: Lane, head: Sequence) -> bool:
    """Whether a sequence has room whatever the others become."""
    config = world.config
    if not lane.is_paged:
        return lane.pool.fits(lane.num_blocks_for(max(1, head.max_length - 1)))
    hit = lane.prefix_hit(head)
    available = lane.pool.num_available - lane.pool.num_evictable(hit)
    if config.admission is Admission.IMMEDIATE and config.preemption is not Preemption.NONE:
        length = len(head.tokens) + (head.params.max_tokens > head.num_generated + 1)
        need = -(-length // lane.block_size) - len(hit)
        return need + max(lane.watermark_blocks, len(lane.decoding)) + len(lane.prefilling) <= available
    finals = [min(s.max_length, lane.model.max_model_len) - 1 for s in [*lane.running(), head]]
    held = sum(int(lane.num_blocks[s.slot]) for s in lane.running()) + len(hit)
    need = sum(-(-final // lane.block_size) for final in finals) + len(finals) // 2 + 1 - held
    return need + max(lane.watermark_blocks, len(lane.decoding)) + len(lane.prefilling) <= available


def check_waited(world: World) -> None:
    """The time that each sequence has waited for each reason adds up, and so do the totals.

    Costly, so sequences are looked at every eighth time.
    """
    world.num_checks += 1
    looked_at = world.scheduler.live.items() if world.num_checks % 8 == 0 else []
    for key, sequence in looked_at:
        queue = world.scheduler.queues[sequence.model]
        told = queue.waited(sequence, world.now) if sequence.lane is None else sequence.waited
        _compare(told, world.streams[key].waited, f"{world.streams[key]} waited")
    total = dict(world.scheduler.counters.waited_s)
    for queue in world.scheduler.queues.values():
        # The totals are brought up to date when something happens to the queue.
        for clock in (queue._clock, queue._beyond_clock):
            for reason, count in clock.by_reason().items():
                total[reason] += count * max(0.0, world.now - clock.now)
    _compare(total, world.waited, "all together waited")


def _compare(told: dict[WaitReason, float], real: dict[WaitReason, float], what: str) -> None:
    for reason in {*told, *real}:
        one, two = told.get(reason, 0.0), real.get(reason, 0.0)
        assert math.isclose(one, two, rel_tol=1e-9, abs_tol=1e-6), f"{what} {two} s for {reason}, {one} s by the core"
