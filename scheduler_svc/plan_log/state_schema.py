"""Every field of every class of the core that has state, and how it is carried.

Heaps are kept as they stand, with their entries of the past: sequences are gone through in their order.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping

from common.wire import Limits, NewSequence, Retention, SamplingParams, TransferPoint
from scheduler_svc.core import Lane, Scheduler, Sequence, State, WaitReason
from scheduler_svc.core.availability import Availability
from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.config import Eviction
from scheduler_svc.core.counters import Counters, Histogram, ModelCounters
from scheduler_svc.core.drain_rate import DrainRate
from scheduler_svc.core.eviction import RecencyOrder, WeightOrder
from scheduler_svc.core.fair import FairQueue, FairShare
from scheduler_svc.core.handover import Handovers, Transit
from scheduler_svc.core.host_pool import HostPool
from scheduler_svc.core.iteration import InFlight, PlanChanges
from scheduler_svc.core.key_usage import KeyUsage
from scheduler_svc.core.model_queue import ModelQueue
from scheduler_svc.core.pacing import Pace
from scheduler_svc.core.prediction import OutputLengths
from scheduler_svc.core.run_pool import RunPool
from scheduler_svc.core.timeouts import Timeouts
from scheduler_svc.core.wait_clock import WaitClock
from scheduler_svc.core.waiting_queue import WaitingQueue
from scheduler_svc.plan_log.state_codec import (
    Array,
    Card,
    Chain,
    Choice,
    Codec,
    Converted,
    Digests,
    Given,
    Instance,
    IntMap,
    Ints,
    IntTuples,
    LaneEpoch,
    Listed,
    Mapped,
    OrNone,
    Plain,
    Record,
    Rows,
    SequenceNumber,
    Swapped,
    Tupled,
    WirePart,
)


def _inverted(hash_of: list[bytes | None]) -> dict[bytes, int]:
    return {digest: block for block, digest in enumerate(hash_of) if digest is not None}


Fields = Mapping[str, Codec]
PLAIN, ARRAY, SEQUENCE = Plain(), Array(), SequenceNumber()
PAIR = Tupled(PLAIN, PLAIN)
BY_REASON = Mapped(Choice(WaitReason), PLAIN)
COUNTER = Mapped(PLAIN, PLAIN, Counter)
ORDER = Instance(RecencyOrder, WeightOrder)
LINE = Instance(WaitingQueue, FairQueue)


def _plain(*names: str) -> Fields:
    return dict.fromkeys(names, PLAIN)


def _histograms(*names: str) -> Fields:
    return dict.fromkeys(names, Instance(Histogram))


def _arrays(*names: str) -> Fields:
    return dict.fromkeys(names, ARRAY)


_FIELDS: dict[type, Fields] = {
    Scheduler: {
        "config": Given(lambda restoring: restoring.config),
        "counters": Instance(Counters),
        "handovers": Instance(Handovers),
        "lanes": Given(lambda restoring: restoring.lanes),
        "queues": Mapped(PLAIN, Instance(ModelQueue)),
        "availability": Instance(Availability),
        "outbox": Given(lambda restoring: []),
        "live": Mapped(PAIR, SEQUENCE),
        "by_request": Mapped(PLAIN, Mapped(PLAIN, SEQUENCE)),
        "key_usage": Instance(KeyUsage),
        **_plain("_num_submitted", "_last_epoch"),
        "_drain_rate": Instance(DrainRate),
        "_timeouts": Instance(Timeouts),
    },
    Availability: {
        "config": Given(lambda restoring: restoring.config),
        "lanes": Given(lambda restoring: restoring.lanes),
        "queues": Given(lambda restoring: restoring.fields[-2]["queues"]),
        "models": Mapped(PLAIN, Card()),
        **dict.fromkeys(("kv_capacity", "_vacant_since", "_shrunk_since"), Mapped(PLAIN, PLAIN)),
    },
    Counters: {
        **_plain("recomputed_tokens", "swapped_out_blocks", "swapped_in_blocks", "iterations", "lanes_lost"),
        **_plain("handover_blocks", "handovers_done", "handovers_failed"),
        "ended": COUNTER,
        "waited_s": BY_REASON,
    },
    ModelCounters: {
        **_plain("prompt_tokens", "generation_tokens", "preemptions", "prefix_queries", "prefix_hits", "failovers"),
        **_plain("budget_tokens", "busy_s", "bubble_s"),
        **dict.fromkeys(("ended", "refused"), COUNTER),
        **_histograms("time_to_first_token", "inter_token_latency", "time_per_output_token", "iteration_tokens"),
        **_histograms("e2e_latency", "queue_time", "prefill_time", "decode_time", "inference_time", "recovery_time"),
        **_histograms("request_prompt_tokens", "request_generation_tokens", "request_longest_generation"),
        **_histograms("request_n", "request_max_tokens"),
    },
    DrainRate: _plain("mean_gap_s", "last_ended_at"),
    Timeouts: {"_heap": Listed(Tupled(PLAIN, PLAIN, SEQUENCE)), "_num_watched": PLAIN},
    Histogram: {
        "_bounds": Converted(list, tuple),
        **_arrays("_bounds_array", "_counts"),
        "_sum": PLAIN,
        "_told": Given(lambda restoring: None),
    },
    Sequence: {
        **_plain("owner", "stream", "index", "request_id", "model", "priority", "number", "arrived", "prompt_length"),
        **_plain("tenant", "salt", "deadline", "ends_at", "rank", "ticket", "slot", "aborted", "prefilling", "is_long"),
        **_plain(
            "hash_key", "fingerprint", "cached_tokens", "admitted", "last_token_at", "num_preemptions", "num_reached"
        ),
        **_plain("strikes", "struck_at", "key_row", "call", "n"),
        **_plain("first_token_at", "num_failovers", "lost_at", "longest_answer"),
        "params": WirePart(SamplingParams),
        "tokens": ARRAY,
        "retention": Choice(Retention),
        "key": Tupled(PLAIN, PLAIN, PLAIN),
        "waited": BY_REASON,
        "swapped": OrNone(Swapped()),
        "state": Choice(State),
        "lane": OrNone(LaneEpoch()),
        "hashes": Chain(),
    },
    Lane: {
        "config": Given(lambda restoring: restoring.config),
        "model": Card(),
        "limits": WirePart(Limits),
        "transfer": WirePart(TransferPoint),
        **_plain("epoch", "name", "block_size", "token_budget", "seats", "is_paged", "watermark_blocks", "draining"),
        "peak_too_high": OrNone(Tupled(PLAIN, PLAIN, PLAIN)),
        **_plain("last_ticket", "num_departures", "batch_is_closed", "iteration", "busy_until"),
        **_plain("num_prefills_in_a_row", "stays", "must_empty", "spare", "stands_by"),
        "pool": Instance(BlockPool, RunPool),
        "host": Instance(HostPool),
        "pace": Instance(Pace),
        "in_flight": OrNone(Instance(InFlight)),
        "changes": Instance(PlanChanges),
        "occupant": Listed(OrNone(SEQUENCE)),
        **_arrays("length", "computed", "max_length", "num_blocks", "predicted_length", "num_published", "tenant"),
        "key_row": ARRAY,
        **_arrays("prompt_length", "is_seated", "rank", "owner", "stream", "last_token_at", "generation", "decoding"),
        "tokens": Rows("length"),
        "blocks": Rows("num_blocks"),
        "free_slots": PLAIN,
        "prefilling": Listed(SEQUENCE),
        "arriving": Converted(sorted, set),
        "lent": Mapped(PLAIN, Ints()),
    },
    InFlight: {
        **_plain("iteration", "planned_at", "num_tokens", "swaps_out"),
        "decodes": ARRAY,
        "prefills": Listed(Tupled(SEQUENCE, PLAIN)),
        "deferred": Listed(SEQUENCE),
    },
    PlanChanges: {
        "new": Listed(WirePart(NewSequence)),
        **_plain("freed", "appended_slots", "appended_blocks"),
        **dict.fromkeys(("swap_outs", "swap_ins"), Listed(PAIR)),
    },
    BlockPool: {
        **_plain("num_blocks", "_num_touched", "_num_published"),
        "eviction": Choice(Eviction),
        **dict.fromkeys(("_free", "_references", "_weights"), Ints()),
        **dict.fromkeys(("_evictable", "_kept"), ORDER),
        "_is_kept": Converted(bytes, bytearray),
        "_hash_of": Digests(),
        "_block_of": Given(lambda restoring: _inverted(restoring.fields[-1]["_hash_of"])),
        "_copies": Mapped(PLAIN, PLAIN),
    },
    RunPool: {**_plain("num_blocks", "_num_available"), **dict.fromkeys(("_starts", "_ends"), Ints())},
    RecencyOrder: {"_blocks": Ints(OrderedDict.fromkeys)},
    WeightOrder: {"_now": PLAIN, "_ticks": IntMap(), "_heap": IntTuples(3)},
    HostPool: {
        "num_blocks": PLAIN,
        **dict.fromkeys(("_free", "_released"), Ints()),
        "_is_held": Converted(bytes, bytearray),
    },
    Handovers: {
        "_config": Given(lambda restoring: restoring.config),
        "_counters": Given(lambda restoring: restoring.fields[-2]["counters"]),
        "under_way": Mapped(PLAIN, Instance(Transit)),
        "orders": Given(lambda restoring: []),
        **_plain("_last_ticket", "_byte_s"),
    },
    Transit: {
        **_plain("ticket", "num_hit", "num_moved", "computed", "expected_s", "block_bytes", "recalled"),
        "sequence": SEQUENCE,
        "source": OrNone(LaneEpoch()),
        "target": LaneEpoch(),
    },
    Pace: {
        **_arrays("_moments", "_projection"),
        **_plain("num_observed", "num_with_prefill", "mean_s", "prefill_token_s", "_slowest"),
    },
    OutputLengths: {"_all": ARRAY, "_by_tenant": Mapped(PLAIN, ARRAY, OrderedDict)},
    ModelQueue: {
        "_config": Given(lambda restoring: restoring.config),
        "counters": Instance(ModelCounters),
        "share": OrNone(Instance(FairShare)),
        "short": LINE,
        "long": LINE,
        "beyond": LINE,
        "_clock": Instance(WaitClock),
        "_beyond_clock": Instance(WaitClock),
        "lengths": Instance(OutputLengths),
        **_plain("long_threshold", "room", "token_s", "num_new", "num_new_tokens", "last_ticket", "_ageing"),
        "_timers": Listed(Tupled(PLAIN, PLAIN, PLAIN, SEQUENCE)),
        "_classes": COUNTER,
    },
    WaitingQueue: {
        "_heap": Listed(Tupled(PLAIN, PLAIN, PLAIN, PLAIN, SEQUENCE)),
        "_entry_of": Mapped(PLAIN, PLAIN),
        "_num_entries": PLAIN,
    },
    KeyUsage: {
        "_row_of": Mapped(PLAIN, PLAIN),
        "_calls": Mapped(PLAIN, Mapped(PAIR, PLAIN)),
        **_arrays("_rate", "_balance", "_settled_at"),
        **_plain("_free", "_sweep_at"),
    },
    FairShare: {
        "_weights": Given(lambda restoring: restoring.config.tenant_weights),
        **_plain("_output_token_weight", "_free", "_last_left", "_mean"),
        "_index": Mapped(PLAIN, PLAIN),
        **_arrays("_virtual", "_price"),
        **dict.fromkeys(("_waiting", "_live"), COUNTER),
        "_lowest": Converted(sorted, lambda raw: [tuple(entry) for entry in raw]),
        "_listed": Converted(sorted, set),
    },
    FairQueue: {
        "_share": Given(lambda restoring: restoring.fields[-2]["share"]),
        "_lines": Mapped(PAIR, Listed(Tupled(PLAIN, PLAIN, SEQUENCE))),
        "_entry_of": Mapped(PLAIN, PAIR),
        "_tops": Listed(Tupled(*[PLAIN] * 5)),
        "_top_of": Mapped(PAIR, PLAIN),
        "_num_entries": PLAIN,
    },
    WaitClock: {
        "shared": Choice(WaitReason),
        "_own": Mapped(PLAIN, Tupled(SEQUENCE, Choice(WaitReason))),
        "_seconds": Given(lambda restoring: restoring.fields[-3]["counters"].waited_s),
        "_totals": BY_REASON,
        "_entered": Mapped(PLAIN, BY_REASON),
        "now": PLAIN,
    },
}

SCHEMA: dict[type, Record] = {kind: Record(fields) for kind, fields in _FIELDS.items()}
"""How each class of the core that has state is carried."""
