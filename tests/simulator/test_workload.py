"""Synthetic lengths, arrivals and mixes, and what of them a trace keeps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from scheduler_svc.simulator.distributions import ABSURD, DistributionError, arrivals, draw
from scheduler_svc.simulator.workload import WorkloadError, WorkloadSettings, build
from tests.simulator.test_traces import AZURE, MOONCAKE, SHAREGPT, write

SYNTHETIC = WorkloadSettings(requests=1000, prompt_lengths="fixed:8", output_lengths="uniform:2:5")


def random() -> np.random.Generator:
    return np.random.default_rng(7)


def test_lengths_follow_their_distribution() -> None:
    assert draw("fixed:3", 4, random()).tolist() == [3, 3, 3, 3]
    assert set(draw("uniform:2:4", 500, random()).tolist()) == {2, 3, 4}
    lengths = draw("lognormal:100:0.5", 4000, random())
    assert np.median(lengths) == pytest.approx(100, rel=0.05)
    assert np.log(lengths).std() == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize("text", ["fixed:1e30", "uniform:1:1e19", "lognormal:1e30:1", "lognormal:9:1e9"])
def test_an_absurd_length_is_a_length_and_no_overflow(text: str) -> None:
    assert 1 <= draw(text, 50, random()).max() <= ABSURD


@pytest.mark.parametrize(
    "text", ["", "fixed", "fixed:x", "fixed:0", "uniform:4:2", "uniform:1", "lognormal:9:-1", "f:1"]
)
def test_a_text_that_is_no_distribution_is_refused(text: str) -> None:
    with pytest.raises(DistributionError):
        draw(text, 1, random())


@pytest.mark.parametrize("kind", ["poisson", "gamma", "bursts"])
def test_arrivals_rise_at_the_rate(kind: str) -> None:
    times = arrivals(kind, 20_000, 5.0, 2.0, 8, random())
    assert times[0] == 0 and (np.diff(times) >= 0).all()
    assert len(times) / times[-1] == pytest.approx(5.0, rel=0.06)


def test_gamma_gaps_vary_as_told_and_bursts_come_together() -> None:
    gaps = np.diff(arrivals("gamma", 20_000, 5.0, 2.0, 1, random()))
    assert gaps.std() / gaps.mean() == pytest.approx(2.0, rel=0.06)
    times = arrivals("bursts", 24, 5.0, 1.0, 8, random())
    assert len(np.unique(times)) == 3


def test_a_rate_stretches_a_trace(tmp_path: Path) -> None:
    settings = WorkloadSettings(trace=write(tmp_path, AZURE), rate=0.1)
    times = build(settings).arrivals
    assert times[-1] == pytest.approx(20.0)
    assert times[1] / times[2] == pytest.approx(4.314579 / 13.31941)


def test_a_trace_without_times_comes_at_once_or_at_random(tmp_path: Path) -> None:
    settings = WorkloadSettings(trace=write(tmp_path, SHAREGPT))
    assert build(settings).arrivals.tolist() == [0.0, 0.0]
    assert build(replace(settings, rate=2.0)).arrivals[1] > 0


def test_prompts_share_tokens_exactly_where_the_trace_says_so(tmp_path: Path) -> None:
    workload = build(WorkloadSettings(trace=write(tmp_path, MOONCAKE)))
    first, second = workload.prompt(0), workload.prompt(1)
    assert len(first) == 600 and len(second) == 1024
    assert (first[:512] == second[:512]).all() and not (first[512:] == second[512:600]).any()
    alone = build(WorkloadSettings(trace=write(tmp_path, MOONCAKE), prompt_lengths="fixed:600"))
    assert not (alone.prompt(0) == alone.prompt(1)).any()


def test_tenants_classes_and_deadlines_are_mixed_as_told() -> None:
    settings = replace(SYNTHETIC, tenants=3, tenant_skew=1.0, priorities="0:1,5:3", deadlines_ms="fixed:250")
    workload = build(settings)
    counts = np.bincount(workload.tenants, minlength=3) / 1000
    assert counts == pytest.approx(np.array([6, 3, 2]) / 11, abs=0.05)
    assert np.mean(workload.priorities == 5) == pytest.approx(0.75, abs=0.05)
    request = workload.submit(3, "m")
    assert request.tenant == f"t{workload.tenants[3]}" and request.priority == workload.priorities[3]
    assert request.deadline_ms == 250 and request.params.ignore_eos
    assert request.params.max_tokens == workload.output_lengths[3]


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"requests": None}, "without --trace, --requests is needed"),
        ({"requests": 0}, "--requests: must lie within"),
        ({"output_lengths": None}, "without --trace, --output-lengths is needed"),
        ({"output_lengths": "fixed:1e9"}, "--output-lengths: 1000000000 tokens"),
        ({"prompt_lengths": "long"}, "--prompt-lengths: expected fixed:N"),
        ({"rate": 0.0}, "--rate: must be above 0"),
        ({"arrivals": "poisson"}, "--arrivals poisson needs --rate"),
        ({"arrivals": "trace"}, "--arrivals trace: there is no trace"),
        ({"arrivals": "closed"}, "--arrivals closed needs --concurrency"),
        ({"concurrency": 3}, "--concurrency goes with --arrivals closed"),
        ({"tenants": 0}, "--tenants: must be at least 1"),
        ({"tenant_skew": -1.0}, "--tenant-skew"),
        ({"priorities": "high"}, "--priorities: expected CLASS:SHARE"),
        ({"priorities": "0:0"}, "--priorities: shares"),
        ({"deadlines_ms": "soon"}, "--deadlines-ms: expected"),
    ],
)
def test_settings_that_make_no_workload_name_their_flag(changes: dict[str, object], wanted: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        build(replace(SYNTHETIC, **changes))
    assert wanted in str(caught.value)


def test_a_trace_that_is_too_short_is_told(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="--requests: the trace holds 3 requests, 4 were asked for"):
        build(WorkloadSettings(trace=write(tmp_path, AZURE), requests=4))


def test_times_that_do_not_differ_have_no_rate(tmp_path: Path) -> None:
    path = write(tmp_path, MOONCAKE.replace("1500", "0"))
    with pytest.raises(WorkloadError, match="--rate: all requests"):
        build(WorkloadSettings(trace=path, rate=1.0))
