"""Hypothesis as a fuzzer: so many cases from a seed, and the simplest that fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed
from hypothesis import settings as runs
from hypothesis import strategies as st
from hypothesis.errors import HypothesisException


def simplest_failure(
    cases: st.SearchStrategy[Any],
    attempt: Callable[[Any], None],
    count: int,
    start: int,
    faults: tuple[type[BaseException], ...],
) -> str | None:
    """What is wrong with the simplest case at which `attempt` raises one of `faults`; None when it never does."""

    @seed(start)
    @runs(
        max_examples=count,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
        print_blob=False,
    )
    @given(cases)
    def attempt_one(case: Any) -> None:
        attempt(case)

    try:
        attempt_one()
    except (*faults, HypothesisException) as error:
        return f"{type(error).__name__}: {error}"
    return None
