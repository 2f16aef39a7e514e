"""The measures that a recording is made of: quantiles of many values, and fairness between tenants."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler_svc.simulator.fairness import FairnessMeter
from scheduler_svc.simulator.histogram import LogHistogram


def test_quantiles_are_within_a_bin_of_the_exact_ones() -> None:
    values = np.random.default_rng(1).lognormal(-3.0, 1.5, 5000)
    histogram = LogHistogram()
    for part in np.array_split(values, 7):
        histogram.add(part)
    assert histogram.total == 5000
    for share in (0.01, 0.5, 0.9, 0.99):
        assert histogram.quantile(share) == pytest.approx(np.quantile(values, share), rel=0.02)
    seconds, shares = histogram.curve()
    assert (np.diff(seconds) > 0).all() and shares[-1] == 1.0


def test_a_histogram_takes_what_lies_outside_and_nothing_at_all() -> None:
    histogram = LogHistogram()
    assert np.isnan(histogram.quantile(0.5))
    histogram.add(np.array([0.0, 1e9]))
    assert histogram.total == 2 and histogram.quantile(0.5) < 2e-6


def served(meter: FairnessMeter, backlogged: list[int], tokens: list[int]) -> None:
    meter.observe(np.array(backlogged, bool), np.array(tokens, np.float64))


def test_the_gap_counts_only_while_both_wait() -> None:
    meter = FairnessMeter(np.ones(2))
    served(meter, [1, 0], [50, 0])
    assert meter.gap == 0
    served(meter, [1, 1], [3, 1])
    served(meter, [1, 1], [0, 7])
    assert meter.gap == 7, "from two ahead to five behind"
    served(meter, [1, 0], [90, 0])
    served(meter, [1, 1], [2, 0])
    assert meter.gap == 7


def test_service_is_divided_by_the_share() -> None:
    meter = FairnessMeter(np.array([3.0, 1.0]))
    for _ in range(4):
        served(meter, [1, 1], [6, 2])
    assert meter.gap == 0
    served(meter, [1, 1], [6, 0])
    assert meter.gap == 2
