"""The benchmark of the core keeps running as the core changes."""

from __future__ import annotations

import pytest

from benchmarks.scheduler_cost import Case, measure, summary


@pytest.mark.parametrize("case", [Case("decode", 4, waiting=3), Case("admit", 4, waiting=3, context=40)])
def test_a_small_case_gives_figures(case: Case) -> None:
    line = summary(case, measure(case, 2, None))
    assert (line["what"], line["running"], line["waiting"]) == (case.what, 4, 3)
    for name in ("plan_us", "apply_us"):
        value = line[name]
        assert isinstance(value, float) and value > 0
    assert line["peer_us"] is None and (line["submit_us"] is None) == (case.what == "decode")
