"""The metrics that this service exposes: what each is called, what it means, and how it travels in a `Stats` message.

The core counts and puts its figures into `Stats` under keys in Prometheus' own label syntax, `name` or
`name{label="value",…}`; a frontend turns them into the text that `/metrics` answers. Both read this table.
Names under `vllm:` mean what they mean there, so that dashboards made for it work; our own begin with `gilir_`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from scheduler_svc.core.counters import (
    FIRST_TOKEN_S,
    ITERATION_TOKENS,
    REQUEST_N,
    REQUEST_S,
    REQUEST_TOKENS,
    TOKEN_GAP_S,
)

Kind = Literal["gauge", "counter", "histogram"]

ALL = "all"
"""The label `engine` of what concerns all executors of a model together; else it is the executor's name."""
MODEL = ("model_name", "engine")


@dataclass(frozen=True, slots=True)
class Metric:
    """One family. `bounds` are a histogram's upper bucket edges without +Inf."""

    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()


def _gauge(text: str, *labels: str) -> Metric:
    return Metric("gauge", text, labels)


def _counter(text: str, *labels: str) -> Metric:
    return Metric("counter", text, labels)


def _histogram(text: str, bounds: tuple[float, ...]) -> Metric:
    return Metric("histogram", text, MODEL, bounds)


CATALOGUE: dict[str, Metric] = {
    "vllm:num_requests_running": _gauge("Sequences that have a seat on an executor.", *MODEL),
    "vllm:num_requests_waiting": _gauge("Sequences that wait for a seat.", *MODEL),
    "vllm:num_requests_waiting_by_reason": _gauge(
        "Sequences that wait for a seat, by what they lack.", *MODEL, "reason"
    ),
    "vllm:kv_cache_usage_perc": _gauge("Share of the KV blocks that live sequences hold, 0 to 1.", *MODEL),
    "vllm:cache_config_info": _gauge(
        "Block size and number of blocks, as labels; always 1.", "block_size", "num_gpu_blocks", *MODEL
    ),
    "vllm:prefix_cache_queries": _counter("Prompt tokens looked up in the prefix cache.", *MODEL),
    "vllm:prefix_cache_hits": _counter("Prompt tokens found in the prefix cache.", *MODEL),
    "vllm:num_preemptions": _counter("Sequences that lost their seat to another one.", *MODEL),
    "vllm:admission_rejections": _counter("Sequences that were refused, by reason.", *MODEL, "reason"),
    "vllm:prompt_tokens": _counter("Prompt tokens of sequences that have got a first token.", *MODEL),
    "vllm:generation_tokens": _counter("Tokens generated.", *MODEL),
    "vllm:request_success": _counter(
        "Sequences that have ended: stop (also by a stop string), length, abort, error.",
        *MODEL,
        "finished_reason",
    ),
    "vllm:iteration_tokens_total": _histogram("Tokens computed in an iteration.", ITERATION_TOKENS),
    "vllm:request_prompt_tokens": _histogram("Prompt tokens of a finished sequence.", REQUEST_TOKENS),
    "vllm:request_generation_tokens": _histogram("Generated tokens of a finished sequence.", REQUEST_TOKENS),
    "vllm:request_max_num_generation_tokens": _histogram(
        "Generated tokens of the longest whole answer of a request, when its last sequence has ended.", REQUEST_TOKENS
    ),
    "vllm:request_params_n": _histogram("Sequences that an accepted request asks for.", REQUEST_N),
    "vllm:request_params_max_tokens": _histogram(
        "Most tokens that a sequence of an accepted request may generate.", REQUEST_TOKENS
    ),
    "vllm:time_to_first_token_seconds": _histogram("From a sequence's arrival to its first token.", FIRST_TOKEN_S),
    "vllm:inter_token_latency_seconds": _histogram("Between two tokens of a sequence.", TOKEN_GAP_S),
    "vllm:request_time_per_output_token_seconds": _histogram(
        "Mean time between two tokens of a finished sequence.", TOKEN_GAP_S
    ),
    "vllm:e2e_request_latency_seconds": _histogram("From a sequence's arrival to its last token.", REQUEST_S),
    "vllm:request_queue_time_seconds": _histogram("From a sequence's arrival to its first seat.", REQUEST_S),
    "vllm:request_prefill_time_seconds": _histogram("From a sequence's first seat to its first token.", REQUEST_S),
    "vllm:request_decode_time_seconds": _histogram("From a sequence's first token to its last.", REQUEST_S),
    "vllm:request_inference_time_seconds": _histogram("From a sequence's first seat to its last token.", REQUEST_S),
    "gilir_lanes": _gauge("Executors attached."),
    "gilir_executor_state": _gauge("What an attached executor does, as a label; always 1.", *MODEL, "state"),
    "gilir_live_sequences": _gauge("Sequences waiting or running."),
    "gilir_running_sequences": _gauge("Sequences that have a seat on this executor.", *MODEL),
    "gilir_seats": _gauge("Sequences that an executor may run at a time; 0 while it takes none.", *MODEL),
    "gilir_token_budget": _gauge("Tokens that an iteration of the executor may hold.", *MODEL),
    "gilir_kv_blocks_referenced": _gauge("KV blocks that live sequences hold.", *MODEL),
    "gilir_kv_blocks_cached": _gauge("KV blocks that hold only reusable prefixes.", *MODEL),
    "gilir_iteration_deadline_seconds": _gauge("How long the executor's newest iteration may take.", *MODEL),
    "gilir_plan_bytes": _gauge("Size of the last plan on the wire, in bytes."),
    "gilir_batch_lines": _gauge("Lines of batches: waiting or in flight, completed, failed, by state.", "state"),
    "gilir_kept_streams": _gauge("Resumable streams that the frontends keep, read or not."),
    "gilir_kept_stream_bytes": _gauge("What they take, in bytes."),
    "gilir_iterations": _counter("Iterations applied."),
    "gilir_budget_tokens": _counter(
        "Token budgets of the iterations applied; how full they were: vllm:iteration_tokens_total_sum over it.", *MODEL
    ),
    "gilir_busy_seconds": _counter("Seconds that executors worked on iterations.", *MODEL),
    "gilir_bubble_seconds": _counter(
        "Seconds that executors stood idle between two iterations while sequences were running.", *MODEL
    ),
    "gilir_waiting_seconds": _counter("Seconds that sequences have waited, by what they lacked.", "reason"),
    "gilir_requests_ended": _counter("Sequences that have ended, or were refused, by reason.", "reason"),
    "gilir_swapped_blocks": _counter("KV blocks moved between device and host memory, by direction.", "direction"),
    "gilir_handover_blocks": _counter("KV blocks that came straight from an executor that drains."),
    "gilir_handovers": _counter("Sequences whose KV was to come so, by outcome.", "outcome"),
    "gilir_recomputed_tokens": _counter("Tokens computed once more after their KV was given up."),
    "gilir_executors_lost": _counter("Executors lost: death, silence, overdue or faulty results."),
    "gilir_failovers": _counter("Running sequences whose executor was lost.", *MODEL),
    "gilir_recovery_seconds": _histogram(
        "From the loss of a sequence's executor to its next token; the count is that of recoveries.", FIRST_TOKEN_S
    ),
    "gilir_iterations_overdue": _counter(
        "Executors lost over a late iteration, by what its deadline came from.", "deadline"
    ),
    "gilir_junk_messages": _counter("Messages dropped because the protocol does not allow them."),
}
"""By name. Counters stand here without the `_total` that the exposition format puts behind them."""

_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_SPECIAL = re.compile(r'[\\"\n]')
_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n"}
_UNESCAPES = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}


def metric_key(name: str, **labels: str) -> str:
    """The key of one series in a `Stats` message: `name` or `name{label="value",…}`."""
    return _key(name, tuple(labels.items()))


@lru_cache(1 << 14)
def _key(name: str, labels: tuple[tuple[str, str], ...]) -> str:
    """Made once: the core tells hundreds of them at each beat."""
    if not labels:
        return name
    pairs = ",".join(f'{label}="{escape(value)}"' for label, value in labels)
    return f"{name}{{{pairs}}}"


def escape(value: str) -> str:
    """A label's value as it stands between quotation marks."""
    return _SPECIAL.sub(lambda found: _ESCAPES[found[0]], value)


def parse_key(key: str) -> tuple[str, dict[str, str]]:
    """Split a key into its name (a counter's `_total` taken off) and its labels. Raises ValueError on other text."""
    name, brace, rest = key.partition("{")
    labels: dict[str, str] = {}
    if brace:
        if not rest.endswith("}"):
            raise ValueError(f"metric key {key[:100]!r} has no closing brace")
        body, place = rest[:-1], 0
        while place < len(body):
            found = _LABEL.match(body, place)
            if found is None:
                raise ValueError(f"metric key {key[:100]!r} has labels that cannot be read")
            labels[found[1]] = re.sub(r"\\.", lambda m: _UNESCAPES.get(m[0], m[0]), found[2])
            place = found.end()
            if place < len(body):
                if body[place] != ",":
                    raise ValueError(f"metric key {key[:100]!r} has labels that cannot be read")
                place += 1
    if name not in CATALOGUE and name.removesuffix("_total") in CATALOGUE:
        name = name.removesuffix("_total")
    return name, labels
