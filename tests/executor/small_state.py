"""A small batch state for tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from common.wire import FinishCode, Limits, Plan
from executor_svc.batch import BatchState
from tests.executor.plans import ids, new_sequence, slots

VOCABULARY = 100
LIMITS = Limits(block_size=4, num_blocks=32, num_host_blocks=4, max_num_seqs=6, max_num_batched_tokens=64)


def make_state(**limits: Any) -> BatchState:
    values = {name: getattr(LIMITS, name) for name in LIMITS.__dataclass_fields__} | limits
    return BatchState(Limits(**values), max_model_len=40, vocab_size=VOCABULARY, eos_ids=(0, 1))


def busy_state() -> BatchState:
    """0: decoding; 1: 5 of 10 tokens computed; 2: free; 3: ended; 4: at the end of its block; 5: free."""
    state = make_state()
    new = (
        new_sequence(0, [5, 6], [0]),
        new_sequence(1, list(range(10, 20)), [1, 2, 3]),
        new_sequence(3, [5], [4], max_tokens=1),
        new_sequence(4, [7] * 4, [5]),
    )
    work = state.apply(Plan(1, 1, prefills=slots(0, 1, 3, 4), prefill_lengths=ids(2, 5, 1, 4), new=new))
    assert state.advance(work, np.array([50, 51, 52])).tolist() == [0, FinishCode.LENGTH, 0]
    return state
