"""What the core tells its frontends of itself, under the names of `scheduler_svc.metrics`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from common.wire import EndReason, FrontendAlive, Stats
from scheduler_svc.core import Scheduler, WaitReason
from scheduler_svc.core.counters import ModelCounters
from scheduler_svc.core.pacing import SOURCES
from scheduler_svc.membership import Membership
from scheduler_svc.metrics import ALL, metric_key

FINISHED_REASONS = {
    EndReason.EOS: "stop",
    EndReason.STOP_TOKEN: "stop",
    EndReason.STOP_STRING: "stop",
    EndReason.LENGTH: "length",
    EndReason.ABORTED: "abort",
}
"""`finished_reason` labels as dashboards know them; every other ending is an error."""
REFUSALS = (
    EndReason.QUEUE_FULL,
    EndReason.OVER_LIMIT,
    EndReason.REJECTED,
    EndReason.NO_EXECUTOR,
    EndReason.SHUTDOWN,
)
"""How a sequence that was not accepted may end."""


def gather(scheduler: Scheduler, membership: Membership, *, stopping: bool) -> Stats:
    """A beat: readiness, gauges, counters and histograms. What can be counted of a known model is there from 0 on."""
    serving = any(lane.admits for lane in scheduler.lanes.values())
    return Stats(
        ready=serving and not stopping,
        stopping=stopping,
        gauges=_gauges(scheduler, membership),
        counters=_counters(scheduler, membership),
        histograms=_histograms(scheduler),
    )


def kept_gauges(frontends: Iterable[FrontendAlive]) -> dict[str, float]:
    """What all frontends keep for clients who resume their streams."""
    told = list(frontends)
    return {
        "gilir_kept_streams": sum(alive.kept_streams for alive in told),
        "gilir_kept_stream_bytes": sum(alive.kept_bytes for alive in told),
    }


def _gauges(scheduler: Scheduler, membership: Membership) -> dict[str, float]:
    gauges: dict[str, float] = {
        "gilir_lanes": len(scheduler.lanes),
        "gilir_live_sequences": len(scheduler.live),
        "gilir_plan_bytes": membership.last_plan_bytes,
    }
    running = Counter(dict.fromkeys(scheduler.queues, 0))
    for lane in scheduler.lanes.values():
        pool, labels = lane.pool, {"model_name": lane.model.name, "engine": lane.name}
        running[lane.model.name] += lane.num_running
        gauges[metric_key("vllm:kv_cache_usage_perc", **labels)] = pool.num_referenced / pool.num_blocks
        gauges[metric_key("gilir_kv_blocks_referenced", **labels)] = pool.num_referenced
        gauges[metric_key("gilir_kv_blocks_cached", **labels)] = pool.num_cached
        gauges[metric_key("gilir_token_budget", **labels)] = lane.token_budget
        gauges[metric_key("gilir_running_sequences", **labels)] = lane.num_running
        gauges[metric_key("gilir_seats", **labels)] = lane.seats if lane.admits else 0
        sizes = {"block_size": str(lane.block_size), "num_gpu_blocks": str(pool.num_blocks)}
        gauges[metric_key("vllm:cache_config_info", **sizes, **labels)] = 1
    for model, queue in scheduler.queues.items():
        labels, by_reason = {"model_name": model, "engine": ALL}, queue.by_reason()
        gauges[metric_key("vllm:num_requests_running", **labels)] = running[model]
        gauges[metric_key("vllm:num_requests_waiting", **labels)] = len(queue)
        for reason in WaitReason:
            if reason is not WaitReason.NONE:
                key = metric_key("vllm:num_requests_waiting_by_reason", **labels, reason=reason.value)
                gauges[key] = by_reason[reason]
    for executor in membership.executors:
        labels = {"model_name": executor.lane.model.name, "engine": executor.name}
        gauges[metric_key("gilir_executor_state", **labels, state=executor.state)] = 1
        if executor.allowed is not None:
            gauges[metric_key("gilir_iteration_deadline_seconds", **labels)] = executor.allowed.seconds
    return gauges


def _counters(scheduler: Scheduler, membership: Membership) -> dict[str, float]:
    counters = scheduler.counters
    found: dict[str, float] = {
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
    for model, queue in scheduler.queues.items():
        found |= _counters_of(model, queue.counters)
    return found


def _counters_of(model: str, counters: ModelCounters) -> dict[str, float]:
    labels = {"model_name": model, "engine": ALL}
    ended: Counter[str] = Counter()
    for reason in EndReason:
        ended[FINISHED_REASONS.get(reason, "error")] += counters.ended[reason.name]
    plain: dict[str, float] = {
        "vllm:prompt_tokens": counters.prompt_tokens,
        "vllm:generation_tokens": counters.generation_tokens,
        "vllm:num_preemptions": counters.preemptions,
        "vllm:prefix_cache_queries": counters.prefix_queries,
        "vllm:prefix_cache_hits": counters.prefix_hits,
        "gilir_failovers": counters.failovers,
        "gilir_budget_tokens": counters.budget_tokens,
        "gilir_busy_seconds": counters.busy_s,
        "gilir_bubble_seconds": counters.bubble_s,
    }
    return {
        **{metric_key(name, **labels): value for name, value in plain.items()},
        **{metric_key("vllm:request_success", **labels, finished_reason=reason): n for reason, n in ended.items()},
        **{
            metric_key("vllm:admission_rejections", **labels, reason=r.name.lower()): counters.refused[r.name]
            for r in REFUSALS
        },
    }


def _histograms(scheduler: Scheduler) -> dict[str, tuple[float, ...]]:
    found: dict[str, tuple[float, ...]] = {}
    for model, queue in scheduler.queues.items():
        counters = queue.counters
        each = {
            "vllm:iteration_tokens_total": counters.iteration_tokens,
            "vllm:request_prompt_tokens": counters.request_prompt_tokens,
            "vllm:request_generation_tokens": counters.request_generation_tokens,
            "vllm:request_max_num_generation_tokens": counters.request_longest_generation,
            "vllm:request_params_n": counters.request_n,
            "vllm:request_params_max_tokens": counters.request_max_tokens,
            "vllm:time_to_first_token_seconds": counters.time_to_first_token,
            "vllm:inter_token_latency_seconds": counters.inter_token_latency,
            "vllm:request_time_per_output_token_seconds": counters.time_per_output_token,
            "vllm:e2e_request_latency_seconds": counters.e2e_latency,
            "vllm:request_queue_time_seconds": counters.queue_time,
            "vllm:request_prefill_time_seconds": counters.prefill_time,
            "vllm:request_decode_time_seconds": counters.decode_time,
            "vllm:request_inference_time_seconds": counters.inference_time,
            "gilir_recovery_seconds": counters.recovery_time,
        }
        labels = {"model_name": model, "engine": ALL}
        found |= {metric_key(name, **labels): histogram.cumulative() for name, histogram in each.items()}
    return found
