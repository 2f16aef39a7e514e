"""What an operator chooses about scheduling: every choice that the field makes, see docs/policies.md."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from enum import StrEnum


class Batching(StrEnum):
    """When the membership of the batch may change."""

    ITERATION = "iteration"
    """After every iteration (Orca, OSDI'22)."""
    REQUEST = "request"
    """When its longest member has ended: the baseline that iteration-level scheduling replaces."""


class Prefill(StrEnum):
    """What may share an iteration."""

    MIXED = "mixed"
    """Decodes first, prefill in the rest of the token budget (Sarathi-Serve, OSDI'24)."""
    SEPARATE = "separate"
    """An iteration holds prefills or decodes; prefills go first."""


class KvLayout(StrEnum):
    """How a sequence gets its KV blocks."""

    PAGED = "paged"
    """One by one as it grows (PagedAttention, SOSP'23)."""
    CONTIGUOUS = "contiguous"
    """All that it may ever need, as one run of blocks, at admission (Orca). Prefixes cannot be shared."""


class Preemption(StrEnum):
    """What becomes of the KV of a sequence that must give way."""

    RECOMPUTE = "recompute"
    SWAP = "swap"
    """It waits in the executor's host pool; where that is full it is recomputed."""
    NONE = "none"
    """Nobody ever gives way: a sequence is admitted when all that it may become fits beside the others."""


class Handover(StrEnum):
    """Whether a lane that drains sends the KV of its sequences to another lane."""

    AUTO = "auto"
    """Where that is likely to take less time than to compute it anew."""
    ALWAYS = "always"
    """Wherever it is possible."""
    NEVER = "never"


class Eviction(StrEnum):
    """Which cached block goes first when blocks are needed."""

    LRU = "lru"
    """The one released longest ago."""
    LFU = "lfu"
    """The one shared least often; among those, the one released longest ago."""
    FIFO = "fifo"
    """The one published first."""


class Discipline(StrEnum):
    """Order of service within and between priority classes."""

    FCFS = "fcfs"
    """Classes are strict; within one, by arrival."""
    PRIORITY = "priority"
    """By arrival within a class, and waiting lifts a sequence from class to class."""
    FAIR = "fair"
    """The tenant that was served least comes first (virtual token counter, VTC, OSDI'24)."""
    DEADLINE = "deadline"
    """Earliest deadline first; who will miss it comes after those who can meet theirs, until it has aged."""


class Admission(StrEnum):
    """What must fit before a sequence gets a seat."""

    PREDICTED = "predicted"
    """The peak of KV blocks that the running set and the newcomer will reach by what is known of output lengths."""
    IMMEDIATE = "immediate"
    """Its known tokens, and a block for each running decode."""
    WORST_CASE = "worst_case"
    """All that the running set and the newcomer may become."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits and choices; an executor's own limits count too, and the lower one wins."""

    max_num_seqs: int = 256
    """Seats: sequences that run on one lane at a time."""
    max_num_batched_tokens: int = 2048
    """Token budget of one iteration: each decode takes one, prefill chunks the rest."""

    batching: Batching = Batching.ITERATION
    prefill: Prefill = Prefill.MIXED
    chunked_prefill: bool = True
    """Whether a prefill may be cut to fill the budget. Without it only one that does not fit beside the decodes is."""
    kv: KvLayout = KvLayout.PAGED
    preemption: Preemption = Preemption.RECOMPUTE
    handover: Handover = Handover.AUTO
    eviction: Eviction = Eviction.LRU
    discipline: Discipline = Discipline.PRIORITY
    admission: Admission = Admission.PREDICTED

    max_prefill_chunk: int = 0
    """Most prompt tokens of one sequence in one iteration; 0: the token budget alone bounds it."""
    long_prefill_threshold: int = 0
    """Prompts with more tokens than this are *long*: one at a time is prefilled, and short ones pass it. 0: a quarter
    of the smallest token budget among the lanes. Without chunked prefill none is: it could not share an iteration."""
    target_itl_ms: float = 0.0
    """Prefill rides along with decodes as far as iterations stay within this time, by what they took so far; 0: off."""
    watermark: float = 0.01
    """Share of a lane's KV blocks that an admission leaves free for the decodes already running."""
    prefix_caching: bool = True

    isolate_tenants: bool = False
    """Prefixes are shared within a tenant only."""

    ageing_s: float = 30.0
    """Seconds of waiting that lift a sequence by one class, up to the best class there is; 0: never. Not for `fcfs`.
    Under `deadline`, who has missed theirs by so much goes before the others of its class."""
    tenant_weights: dict[str, float] = field(default_factory=dict)
    """Shares of tenants under `fair`; 1 where none is given."""
    output_token_weight: float = 2.0
    """What a generated token counts under `fair` beside a computed prompt token."""
    default_deadline_s: float = 60.0
    """Seconds from arrival in which a request wants to be answered, under `deadline`, when it does not say."""

    max_waiting: int = 4096
    """Sequences that may wait; more are refused. Preempted ones do not count."""
    max_waiting_tokens: int = 0
    """Prompt tokens of those; 0: any number."""
    request_timeout_s: float = 0.0
    """Seconds after which a request that does not say otherwise ends with an error; 0: never."""
    hold_s: float = 30.0
    """Seconds that sequences wait for an executor when their model has none."""
    max_strikes: int = 4
    """A sequence whose plans were lost this often, without progress in between, ends with an error."""

    def long_threshold(self, token_budget: int) -> int:
        """Most tokens of a prompt that is not long."""
        if not self.chunked_prefill:
            return sys.maxsize
        return self.long_prefill_threshold or max(1, token_budget // 4)
