"""The JSON that the live page is sent. Names are short: thousands of rows travel."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any, TypeVar

import orjson

from common.wire import Iterations, SeenBlocks, SeenLane, SeenSequence, SeenWaiting, Stats
from scheduler_svc.metrics import CATALOGUE

T = TypeVar("T")

LATENCIES = {
    "ttft": "vllm:time_to_first_token_seconds",
    "itl": "vllm:inter_token_latency_seconds",
    "queue": "vllm:request_queue_time_seconds",
    "e2e": "vllm:e2e_request_latency_seconds",
}
COUNTERS = {
    "iterations": "gilir_iterations",
    "tokens": "vllm:generation_tokens",
    "preemptions": "vllm:num_preemptions",
    "lost": "gilir_executors_lost",
}


def render_rows(answer: Iterations) -> Iterator[bytes]:
    """Each iteration as a JSON object.

    `n`: its number. `lane`: the epoch of its lane. `it`: the lane's own count. `at`: when it was planned, milliseconds
    of wall time. `ms`: how long it took. `lost`: whether its executor was lost with it. `d`, `ds`: slots and sequences
    of the decodes; `p`, `ps`, `pl`: those of the prefill chunks, and their lengths; `l`, `ls`, `lh`: those of who left,
    and how (`Left`).
    """
    wall = time.time() - time.monotonic()
    decode = prefill = left = 0
    for place in range(len(answer.epochs)):
        decodes = slice(decode, decode := decode + int(answer.num_decodes[place]))
        prefills = slice(prefill, prefill := prefill + int(answer.num_prefills[place]))
        gone = slice(left, left := left + int(answer.num_left[place]))
        row = {
            "n": answer.first + place,
            "lane": int(answer.epochs[place]),
            "it": int(answer.iterations[place]),
            "at": round((wall + float(answer.planned_at[place])) * 1000, 1),
            "ms": round(float(answer.seconds[place]) * 1000, 2),
            "lost": bool(answer.lost[place]),
            "d": answer.decode_slots[decodes],
            "ds": answer.decode_sequences[decodes],
            "p": answer.prefill_slots[prefills],
            "ps": answer.prefill_sequences[prefills],
            "pl": answer.prefill_lengths[prefills],
            "l": answer.left_slots[gone],
            "ls": answer.left_sequences[gone],
            "lh": answer.left_how[gone],
        }
        yield orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY)


def render_sequence(seen: SeenSequence, tenant: str) -> dict[str, Any]:
    """What a viewer of this tenant is told of a sequence; an empty tenant is told of all. Others' are anonymous."""
    if tenant and seen.tenant != tenant:
        return {"s": seen.sequence}
    return {
        "s": seen.sequence,
        "id": seen.request_id,
        "index": seen.index,
        "tenant": seen.tenant,
        "prompt": seen.prompt_tokens,
    }


def render_waiting(waiting: SeenWaiting, tenant: str) -> dict[str, Any]:
    """A member of the queue. How long others' answers are is not told."""
    told = render_sequence(waiting.seen, tenant) | {
        "reason": waiting.reason,
        "waited": round(waiting.waited_s, 3),
        "preemptions": waiting.num_preemptions,
    }
    if "id" in told:
        told["generated"] = waiting.generated_tokens
    return told


def render_lane(lane: SeenLane) -> dict[str, Any]:
    """A lane, with the field names of `SeenLane`."""
    return asdict(lane)


def render_blocks(blocks: SeenBlocks) -> dict[str, Any]:
    """What a lane's KV blocks hold: `states` has one digit for each, a `BlockState`; `s` has its holders' sequences."""
    return {
        "epoch": blocks.epoch,
        "step": blocks.step,
        "states": (blocks.states + ord("0")).tobytes().decode(),
        "s": blocks.sequences,
    }


def render_figures(stats: Stats | None) -> dict[str, Any]:
    """Latency histograms and counters of all models together, since the start of the service, as of the last beat."""
    if stats is None:
        return {}
    histograms, counters = _by_family(stats.histograms), _by_family(stats.counters)
    return {
        "latency": {
            name: {
                "bounds": CATALOGUE[key].bounds,
                "counts": [sum(row) for row in zip(*histograms[key], strict=True)][:-1],
            }
            for name, key in LATENCIES.items()
            if key in histograms
        },
        "counters": {name: sum(counters[key]) for name, key in COUNTERS.items() if key in counters},
    }


def _by_family(series: Mapping[str, T]) -> dict[str, list[T]]:
    """The values of each metric's series."""
    found: dict[str, list[T]] = defaultdict(list)
    for key, value in series.items():
        found[key.partition("{")[0]].append(value)
    return found


def event(kind: str, data: bytes) -> bytes:
    """One server-sent event."""
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), data)
