"""What an acknowledged iteration teaches: counters, times between tokens, the pace of its lane."""

from __future__ import annotations

from scheduler_svc.core.applier import Applied
from scheduler_svc.core.counters import Counters, ModelCounters
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
    busy_s: float,
) -> None:
    """Note an iteration that has just been applied; `queue` is that of the lane's model, `busy_s` the executor's."""
    counters.iterations += 1
    slots, of_model = applied.drawn_slots, queue.counters
    of_model.generation_tokens += len(slots)
    of_model.iteration_tokens.observe(flight.num_tokens)
    of_model.budget_tokens += lane.token_budget
    of_model.observe_gaps(lane.last_token_at[slots], now)
    lane.last_token_at[slots] = now
    of_model.busy_s += busy_s
    if lane.busy_until >= 0 and len(flight.decodes):  # what decodes was running already: there was work at once
        of_model.bubble_s += max(0.0, flight.planned_at - lane.busy_until)
    lane.busy_until = flight.planned_at + busy_s
    _observe_firsts(of_model, applied, now)
    num_decodes, seconds = len(flight.decodes), now - flight.planned_at
    lane.pace.observe(num_decodes, flight.num_tokens - num_decodes, seconds, fit=lane.config.target_itl_ms > 0)
    queue.token_s = lane.pace.mean_s
    if queue.share is not None and len(slots):
        queue.share.charge_generated(lane.tenant[slots])
    key_usage.charge_generated(lane.key_row[applied.wanted_slots], now)


def _observe_firsts(counters: ModelCounters, applied: Applied, now: float) -> None:
    """First tokens of answers, and first ones after a loss."""
    for sequence in applied.first_tokens:
        sequence.first_token_at = now
        counters.time_to_first_token.observe(now - sequence.arrived)
        counters.prompt_tokens += sequence.prompt_length
    for sequence in applied.recovered:
        counters.recovery_time.observe(now - sequence.lost_at)
        sequence.lost_at = -1.0
