"""What the core tells its frontends of itself, under the names of `scheduler_svc.metrics`."""

from __future__ import annotations

from collections import Counter

from common.wire import EndReason, Stats
from scheduler_svc.core import Scheduler
from scheduler_svc.core.pacing import SOURCES
from scheduler_svc.membership import Membership
from scheduler_svc.metrics import metric_key

FINISHED_REASONS = {
    EndReason.EOS: "stop",
    EndReason.STOP_TOKEN: "stop",
    EndReason.LENGTH: "length",
    EndReason.ABORTED: "abort",
}
"""`finished_reason` labels as dashboards know them; every other ending is an error."""


def gather(scheduler: Scheduler, membership: Membership, *, stopping: bool) -> Stats:
    """A beat: readiness, gauges, counters and histograms."""
    serving = any(lane.admits for lane in scheduler.lanes.values())
    return Stats(
        ready=serving and not stopping,
        stopping=stopping,
        gauges=_gauges(scheduler, membership),
        counters=_counters(scheduler, membership),
        histograms=_histograms(scheduler),
    )


def _gauges(scheduler: Scheduler, membership: Membership) -> dict[str, float]:
    gauges: dict[str, float] = {
        "vllm:num_requests_running": sum(lane.num_running for lane in scheduler.lanes.values()),
        "vllm:num_requests_waiting": sum(len(queue) for queue in scheduler.queues.values()),
        "gilir_lanes": len(scheduler.lanes),
        "gilir_live_sequences": len(scheduler.live),
        "gilir_plan_bytes": membership.last_plan_bytes,
    }
    for reason, count in scheduler.waiting_by_reason().items():
        gauges[metric_key("vllm:num_requests_waiting_by_reason", reason=reason.value)] = count
    for lane in scheduler.lanes.values():
        pool, labels = lane.pool, {"model_name": lane.model.name, "engine": lane.name}
        gauges[metric_key("vllm:kv_cache_usage_perc", **labels)] = pool.num_referenced / pool.num_blocks
        gauges[metric_key("gilir_kv_blocks_referenced", **labels)] = pool.num_referenced
        gauges[metric_key("gilir_kv_blocks_cached", **labels)] = pool.num_cached
        gauges[metric_key("gilir_token_budget", **labels)] = lane.token_budget
        gauges[metric_key("gilir_seats", **labels)] = lane.seats if lane.admits else 0
        sizes = {"block_size": str(lane.block_size), "num_gpu_blocks": str(pool.num_blocks)}
        gauges[metric_key("vllm:cache_config_info", **sizes, **labels)] = 1
    for executor in membership.executors:
        labels = {"model_name": executor.lane.model.name, "engine": executor.name}
        gauges[metric_key("gilir_executor_state", **labels, state=executor.state)] = 1
        if executor.allowed is not None:
            gauges[metric_key("gilir_iteration_deadline_seconds", **labels)] = executor.allowed.seconds
    return gauges


def _counters(scheduler: Scheduler, membership: Membership) -> dict[str, float]:
    counters = scheduler.counters
    ended: Counter[str] = Counter()
    for reason in EndReason:
        ended[FINISHED_REASONS.get(reason, "error")] += counters.ended[reason.name]
    return {
        "vllm:prompt_tokens": counters.prompt_tokens,
        "vllm:generation_tokens": counters.generation_tokens,
        "vllm:num_preemptions": counters.preemptions,
        "vllm:prefix_cache_queries": counters.prefix_queries,
        "vllm:prefix_cache_hits": counters.prefix_hits,
        **{metric_key("vllm:request_success", finished_reason=reason): count for reason, count in ended.items()},
        **{metric_key("gilir_waiting_seconds", reason=r.value): s for r, s in counters.waited_s.items()},
        metric_key("gilir_swapped_blocks", direction="out"): counters.swapped_out_blocks,
        metric_key("gilir_swapped_blocks", direction="in"): counters.swapped_in_blocks,
        **{metric_key("gilir_requests_ended", reason=r.name.lower()): counters.ended[r.name] for r in EndReason},
        "gilir_handover_blocks": counters.handover_blocks,
        metric_key("gilir_handovers", outcome="done"): counters.handovers_done,
        metric_key("gilir_handovers", outcome="failed"): counters.handovers_failed,
        "gilir_recomputed_tokens": counters.recomputed_tokens,
        "gilir_iterations": counters.iterations,
        "gilir_executors_lost": counters.lanes_lost,
        **{metric_key("gilir_iterations_overdue", deadline=s): membership.num_overdue[s] for s in SOURCES},
        "gilir_junk_messages": membership.num_junk,
    }


def _histograms(scheduler: Scheduler) -> dict[str, tuple[float, ...]]:
    counters = scheduler.counters
    return {
        "vllm:time_to_first_token_seconds": counters.time_to_first_token.cumulative(),
        "vllm:inter_token_latency_seconds": counters.inter_token_latency.cumulative(),
        "vllm:e2e_request_latency_seconds": counters.e2e_latency.cumulative(),
        "vllm:request_queue_time_seconds": counters.queue_time.cumulative(),
        "vllm:iteration_tokens_total": counters.iteration_tokens.cumulative(),
    }
