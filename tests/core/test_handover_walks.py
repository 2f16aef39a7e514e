"""Random histories in which executors come and go, and whatever can fail of a hand-over does."""

from __future__ import annotations

from itertools import product

from scheduler_svc.core.config import KvLayout, Preemption, Prefill
from tests.core.walk import walk


def test_hand_overs_in_random_histories() -> None:
    done = failed = 0
    for number, (preemption, kv, prefill) in enumerate(product(Preemption, KvLayout, Prefill)):
        combination = f"iteration-{prefill}-chunked-{kv}-{preemption}-lru-fair-predicted"
        counters = walk(combination, number, 100, depart=True).scheduler.counters
        done, failed = done + counters.handovers_done, failed + counters.handovers_failed
    assert done and failed
