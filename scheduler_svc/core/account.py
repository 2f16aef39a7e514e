"""Answers what has become of a request."""

from __future__ import annotations

from itertools import islice

from common.wire import Account, Inquiry, SequenceAccount
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence, WaitReason

MAX_SEQUENCES = 256
"""Clients may give many requests one id; no more of them are told of, since the core serves nobody meanwhile."""


def account_of(scheduler: Scheduler, inquiry: Inquiry, now: float) -> Account:
    """Where the live sequences of a request stand; none when it has ended or never was."""
    known = scheduler.by_request.get(inquiry.request_id, {}).values()
    group = list(islice((s for s in known if inquiry.tenant in ("", s.tenant)), MAX_SEQUENCES))
    model = group[0].model if group else ""
    waiting = len(scheduler.queues[model]) if group else 0
    return Account(inquiry.number, model, waiting, tuple(_sequence(scheduler, s, now) for s in group))


def _sequence(scheduler: Scheduler, sequence: Sequence, now: float) -> SequenceAccount:
    lane = sequence.lane
    if lane is not None:
        waited, computed = sequence.waited, int(lane.computed[sequence.slot])
    else:
        waited = scheduler.queues[sequence.model].waited(sequence, now)
        computed = 0 if sequence.swapped is None else sequence.swapped.computed
    return SequenceAccount(
        index=sequence.index,
        state=sequence.state.value,
        reason=scheduler.why(sequence).value,
        executor="" if lane is None else lane.name,
        age_s=now - sequence.arrived,
        waited_s={reason.value: seconds for reason, seconds in waited.items() if reason is not WaitReason.NONE},
        priority=sequence.rank,
        prompt_tokens=sequence.prompt_length,
        computed_tokens=computed,
        generated_tokens=sequence.num_generated,
        cached_tokens=max(sequence.cached_tokens, 0),
        num_preemptions=sequence.num_preemptions,
    )
