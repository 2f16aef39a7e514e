"""What an acknowledged iteration teaches: counters, times between tokens, the pace of its lane."""

from __future__ import annotations

from scheduler_svc.core.applier import Applied
from scheduler_svc.core.counters import Counters
from scheduler_svc.core.iteration import InFlight
from scheduler_svc.core.key_usage import KeyUsage
from scheduler_svc.core.lane import Lane
from scheduler_svc.core.model_queue import ModelQueue


def observe(
    counters: Counters,
    key_usage: KeyUsage,
    queue: ModelQueue,
    lane: Lane,
    flight: InFlight,
    applied: Applied,
    now: float,
) -> None:
    """Note an iteration that has just been applied; `queue` is that of the lane's model."""
    counters.iterations += 1
    slots = applied.drawn_slots
    counters.generation_tokens += len(slots)
    counters.iteration_tokens.observe(flight.num_tokens)
    counters.observe_gaps(lane.last_token_at[slots], now)
    lane.last_token_at[slots] = now
    num_decodes, seconds = len(flight.decodes), now - flight.planned_at
    lane.pace.observe(num_decodes, flight.num_tokens - num_decodes, seconds, fit=lane.config.target_itl_ms > 0)
    queue.token_s = lane.pace.mean_s
    if queue.share is not None and len(slots):
        queue.share.charge_generated(lane.tenant[slots])
    key_usage.charge_generated(lane.key_row[applied.wanted_slots], now)
