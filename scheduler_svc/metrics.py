"""The metrics that this service exposes: what each is called, what it means, and how it travels in a `Stats` message.

The core counts and puts its figures into `Stats` under keys in Prometheus' own label syntax, `name` or
`name{label="value",…}`; a frontend turns them into the text that `/metrics` answers. Both read this table.
Names under `vllm:` mean what they mean there, so that dashboards made for it work; our own begin with `gilir_`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from scheduler_svc.core.counters import SECONDS, TOKENS

Kind = Literal["gauge", "counter", "histogram"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One family. `bounds` are a histogram's upper bucket edges without +Inf."""

    kind: Kind
    help: str
    bounds: tuple[float, ...] = ()


CATALOGUE: dict[str, Metric] = {
    "vllm:num_requests_running": Metric("gauge", "Sequences that have a seat on an executor."),
    "vllm:num_requests_waiting": Metric("gauge", "Sequences that wait for a seat."),
    "vllm:num_requests_waiting_by_reason": Metric("gauge", "Sequences that wait for a seat, by what they lack."),
    "vllm:kv_cache_usage_perc": Metric("gauge", "Share of the KV blocks that live sequences hold, 0 to 1."),
    "vllm:cache_config_info": Metric("gauge", "Block size and number of blocks, as labels; always 1."),
    "vllm:prefix_cache_queries": Metric("counter", "Prompt tokens looked up in the prefix cache."),
    "vllm:prefix_cache_hits": Metric("counter", "Prompt tokens found in the prefix cache."),
    "vllm:num_preemptions": Metric("counter", "Sequences that lost their seat to another one."),
    "vllm:prompt_tokens": Metric("counter", "Prompt tokens of admitted sequences."),
    "vllm:generation_tokens": Metric("counter", "Tokens generated."),
    "vllm:request_success": Metric("counter", "Sequences that ended, by finish reason."),
    "vllm:time_to_first_token_seconds": Metric("histogram", "From a sequence's arrival to its first token.", SECONDS),
    "vllm:inter_token_latency_seconds": Metric("histogram", "Between two tokens of a sequence.", SECONDS),
    "vllm:e2e_request_latency_seconds": Metric("histogram", "From a sequence's arrival to its last token.", SECONDS),
    "vllm:request_queue_time_seconds": Metric("histogram", "From a sequence's arrival to its first seat.", SECONDS),
    "vllm:iteration_tokens_total": Metric("histogram", "Tokens computed in an iteration.", TOKENS),
    "gilir_lanes": Metric("gauge", "Executors attached."),
    "gilir_executor_state": Metric("gauge", "What an attached executor does, as a label; always 1."),
    "gilir_live_sequences": Metric("gauge", "Sequences waiting or running."),
    "gilir_kv_blocks_referenced": Metric("gauge", "KV blocks that live sequences hold."),
    "gilir_kv_blocks_cached": Metric("gauge", "KV blocks that hold only reusable prefixes."),
    "gilir_plan_bytes": Metric("gauge", "Size of the last plan on the wire, in bytes."),
    "gilir_token_budget": Metric("gauge", "Tokens that an iteration of the executor may hold."),
    "gilir_seats": Metric("gauge", "Sequences that an executor may run at a time; 0 while it takes none."),
    "gilir_batch_lines": Metric("gauge", "Lines of batches: waiting or in flight, completed, failed, by state."),
    "gilir_waiting_seconds": Metric("counter", "Seconds that sequences have waited, by what they lacked."),
    "gilir_requests_ended": Metric("counter", "Sequences that have ended, or were refused, by reason."),
    "gilir_swapped_blocks": Metric("counter", "KV blocks moved between device and host memory, by direction."),
    "gilir_handover_blocks": Metric("counter", "KV blocks that came straight from an executor that drains."),
    "gilir_handovers": Metric("counter", "Sequences whose KV was to come so, by outcome."),
    "gilir_recomputed_tokens": Metric("counter", "Tokens computed once more after their KV was given up."),
    "gilir_executors_lost": Metric("counter", "Executors lost: death, silence, overdue or faulty results."),
    "gilir_iterations_overdue": Metric(
        "counter", "Executors lost over a late iteration, by what its deadline came from."
    ),
    "gilir_iteration_deadline_seconds": Metric("gauge", "How long the executor's newest iteration may take."),
    "gilir_iterations": Metric("counter", "Iterations applied."),
    "gilir_junk_messages": Metric("counter", "Messages dropped because the protocol does not allow them."),
}
"""By name. Counters stand here without the `_total` that the exposition format puts behind them."""

_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_SPECIAL = re.compile(r'[\\"\n]')
_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n"}
_UNESCAPES = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}


def metric_key(name: str, **labels: str) -> str:
    """The key of one series in a `Stats` message: `name` or `name{label="value",…}`."""
    if not labels:
        return name
    pairs = ",".join(f'{label}="{_SPECIAL.sub(_escape, value)}"' for label, value in labels.items())
    return f"{name}{{{pairs}}}"


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


def _escape(found: re.Match[str]) -> str:
    return _ESCAPES[found[0]]
