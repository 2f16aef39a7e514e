"""Rows that get no token, as what bounds them is not ready, or leaves none."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from common.wire import Constraint, EndReason, FinishCode
from scheduler_svc.core.lane import LaneError
from tests.core.stream import reason, whole
from tests.core.totals import totals
from tests.core.world import World


def bound(*numbers: int) -> Constraint:
    """See `ModelExecutor`: so many iterations without a token at first; stuck after so many tokens."""
    return Constraint(allowed_ids=np.array(numbers, np.int32))


def world() -> World:
    made = World()
    made.attach()
    return made


@pytest.mark.parametrize("prompt", [3, 4, 9])
def test_a_row_that_is_not_ready_holds_up_nobody(prompt: int) -> None:
    alone = world()
    (mate,) = alone.submit(6, 9, ignore_eos=True)
    iterations = alone.run()
    both = world()
    (mate,) = both.submit(6, 9, ignore_eos=True)
    (late,) = both.submit(prompt, 9, ignore_eos=True, constraint=bound(13))
    for _ in range(iterations):
        both.iterate()
    assert whole(mate) and not late.tokens
    both.run()
    assert whole(late)
    # A first token, and the times between tokens, are counted where tokens come.
    assert totals(both.scheduler).generation_tokens == 18
    assert totals(both.scheduler).prompt_tokens == 6 + prompt


def test_a_stuck_row_ends_alone_with_an_error() -> None:
    served = world()
    (mate,) = served.submit(6, 9, ignore_eos=True)
    (stuck,) = served.submit(5, 9, ignore_eos=True, constraint=bound(0, 2))
    served.run()
    assert whole(mate) and len(stuck.tokens) == 2 and reason(stuck) is EndReason.FAILED
    assert served.scheduler.counters.lanes_lost == 0
    (first,) = served.submit(5, 9, ignore_eos=True, constraint=bound(0, 0))
    served.run()
    assert not first.tokens and reason(first) is EndReason.FAILED


@pytest.mark.parametrize("code", [FinishCode.NOT_READY, FinishCode.STUCK])
def test_only_bound_rows_may_get_no_token(code: FinishCode) -> None:
    served = world()
    served.submit(6, 9, ignore_eos=True)
    served.turn()
    (lane,) = served.lanes
    result = served.out[lane.epoch].result
    with pytest.raises(LaneError, match="without a constraint"):
        served.scheduler.apply(lane, replace(result, finish=np.array([code], np.uint8)), served.now)
