"""Whole runs of the core under the virtual clock: everyone is served, once and in full, and the times add up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scheduler_svc.core import Lane, Scheduler, SchedulerConfig
from scheduler_svc.core.config import Admission, Batching, Discipline, Eviction, KvLayout, Preemption, Prefill
from scheduler_svc.simulator.cost_model import CostModel, load
from scheduler_svc.simulator.recording import Recording
from scheduler_svc.simulator.simulation import ExecutorSetup, Simulation, SimulationError
from scheduler_svc.simulator.summary import gain, summarise
from scheduler_svc.simulator.workload import Workload, WorkloadSettings, build
from tests.core.totals import totals
from tests.simulator.test_traces import MOONCAKE, write

SECOND = CostModel("a second", ((1.0, 0.0, 0.0, 0.0, 0.0, 0.0),))
SETUP = ExecutorSetup(blocks=512, seats=16)


def synthetic(count: int = 60, **changes: Any) -> Workload:
    settings = WorkloadSettings(requests=count, prompt_lengths="uniform:1:90", output_lengths="uniform:1:40", seed=5)
    return build(replace(settings, **changes))


def run(
    workload: Workload, setup: ExecutorSetup = SETUP, cost: CostModel = SECOND, config: SchedulerConfig | None = None
) -> Recording:
    return Simulation(config or SchedulerConfig(), setup, cost, workload).run()


def check_everyone_served(recording: Recording) -> None:
    workload = recording.workload
    assert recording.finished.all() and not recording.refused.any()
    assert (recording.generated == workload.output_lengths).all()
    assert (recording.first_token_at > recording.submitted_at).all()
    assert (recording.last_token_at >= recording.first_token_at).all()
    assert recording.iterations.column("useful").sum() == workload.output_lengths.sum()
    assert recording.num_waiting == 0


@pytest.mark.parametrize(
    "setup",
    [SETUP, ExecutorSetup(blocks=24, seats=8), ExecutorSetup(lanes=3, blocks=64, seats=4), ExecutorSetup(seats=1)],
    ids=["roomy", "short of blocks", "three lanes", "one seat"],
)
@pytest.mark.parametrize("discipline", list(Discipline))
def test_every_request_ends_once_with_all_its_tokens(setup: ExecutorSetup, discipline: Discipline) -> None:
    workload = synthetic(tenants=2, priorities="0:1,1:1", rate=0.2)
    recording = run(workload, setup, load("yi-34b-2xa100"), SchedulerConfig(discipline=discipline))
    check_everyone_served(recording)


CHOICES = [
    SchedulerConfig(batching=Batching.REQUEST),
    SchedulerConfig(prefill=Prefill.SEPARATE),
    SchedulerConfig(chunked_prefill=False),
    SchedulerConfig(kv=KvLayout.CONTIGUOUS),
    SchedulerConfig(preemption=Preemption.SWAP, admission=Admission.IMMEDIATE),
    SchedulerConfig(preemption=Preemption.NONE),
    SchedulerConfig(admission=Admission.WORST_CASE, eviction=Eviction.FIFO),
    SchedulerConfig(eviction=Eviction.LFU, max_prefill_chunk=8, max_num_batched_tokens=32),
    SchedulerConfig(target_itl_ms=100.0, isolate_tenants=True, long_prefill_threshold=20),
]


@pytest.mark.parametrize("config", CHOICES, ids=lambda config: str(CHOICES.index(config)))
def test_every_choice_of_the_core_can_be_simulated(config: SchedulerConfig) -> None:
    schedulers = []

    def make(config: SchedulerConfig) -> Scheduler:
        schedulers.append(Scheduler(config))
        return schedulers[-1]

    setup = ExecutorSetup(lanes=2, blocks=20, host_blocks=30, seats=4)
    workload = synthetic(40, tenants=2, rate=1.0, max_tokens="fixed:60")
    recording = Simulation(config, setup, load("yi-34b-2xa100"), workload, make).run()
    check_everyone_served(recording)
    (scheduler,) = schedulers
    scheduler.check_invariants()
    counters = scheduler.counters
    assert totals(scheduler).preemptions == recording.preemptions and counters.iterations == len(recording.iterations)
    assert totals(scheduler).generation_tokens == recording.generated.sum()
    assert totals(scheduler).prefix_hits == recording.cached.sum()


def test_a_core_that_stands_still_is_told() -> None:
    class Idle(Scheduler):
        def plan(self, lane: Lane, now: float) -> None:
            return None

    with pytest.raises(SimulationError, match="nothing runs, and 3 requests wait"):
        Simulation(SchedulerConfig(), SETUP, SECOND, synthetic(3), Idle).run()


def test_progress_is_told() -> None:
    told: list[tuple[int, int]] = []
    workload = synthetic(300, output_lengths="fixed:2", rate=0.5)
    Simulation(SchedulerConfig(), SETUP, SECOND, workload).run(lambda ended, total: told.append((ended, total)))
    assert told and told == sorted(told) and all(0 <= ended <= total == 300 for ended, total in told)


def test_the_same_seed_gives_the_same_run_and_another_one_does_not() -> None:
    first, again, other = (summarise(run(synthetic(rate=0.5, seed=seed)), SECOND) for seed in (1, 1, 2))
    assert repr(first) == repr(again) != repr(other)


def test_one_seat_waits_as_lindley_says() -> None:
    """One request at a time, each served in one iteration of a second: an M/D/1 queue."""
    workload = synthetic(4000, prompt_lengths="fixed:1", output_lengths="fixed:1", rate=0.7)
    recording = run(workload, ExecutorSetup(seats=1))
    waited = [0.0]
    for gap in np.diff(workload.arrivals):
        waited.append(max(0.0, waited[-1] + 1.0 - gap))
    answered = recording.first_token_at - recording.submitted_at
    assert answered == pytest.approx(np.array(waited) + 1.0)
    pollaczek_khinchine = 0.7 / (2 * (1 - 0.7))
    assert answered.mean() - 1 == pytest.approx(pollaczek_khinchine, rel=0.15)


def test_lanes_work_at_the_same_time() -> None:
    workload = synthetic(8, prompt_lengths="fixed:4", output_lengths="fixed:10")
    one, four = (run(workload, ExecutorSetup(lanes=lanes, seats=2)) for lanes in (1, 4))
    assert one.end == pytest.approx(4 * four.end)
    assert set(four.iterations.column("lane").tolist()) == {0, 1, 2, 3}


def test_a_closed_loop_keeps_its_concurrency() -> None:
    workload = synthetic(30, arrivals="closed", concurrency=3, output_lengths="fixed:5", prompt_lengths="fixed:5")
    recording = run(workload)
    check_everyone_served(recording)
    assert set(recording.iterations.column("rows").tolist()) == {3}
    assert recording.end == 50.0


def test_shared_prefixes_of_a_trace_are_found(tmp_path: Path) -> None:
    workload = build(WorkloadSettings(trace=write(tmp_path, MOONCAKE)))
    found, computed = run(workload), run(workload, config=SchedulerConfig(prefix_caching=False))
    assert found.cached.tolist() == [0, 512] and computed.cached.tolist() == [0, 0]
    assert summarise(found, SECOND).prefix_hit_share == pytest.approx(512 / 1624)


def test_the_summary_adds_up() -> None:
    """Two requests of 3 tokens each, on two seats, in iterations of a second."""
    workload = synthetic(2, prompt_lengths="fixed:16", output_lengths="fixed:3", deadlines_ms="fixed:3500")
    summary = summarise(run(workload, ExecutorSetup(blocks=8, seats=2)), replace(SECOND, request_s=0.25))
    assert summary.requests == 2 and summary.iterations == 3 and summary.makespan_s == 3.0
    assert summary.tokens_per_s == 2.0 and summary.requests_per_s == pytest.approx(2 / 3)
    assert summary.occupancy == 1.0 and summary.useful_rows == 2.0
    assert summary.ttft_p50_s == 1.25 and summary.e2e_p99_s == 3.25
    assert summary.itl_p50_s == pytest.approx(1.0, rel=0.01)
    assert summary.deadline_misses == 0.0
    assert summary.kv_waste == pytest.approx(1 - (16 + 17 + 18) / (16 + 32 + 32))
    late = summarise(run(workload, ExecutorSetup(blocks=8, seats=2)), replace(SECOND, request_s=0.75))
    assert late.deadline_misses == 1.0


def test_requests_that_never_fit_are_refused_and_the_others_served() -> None:
    workload = synthetic(20, output_lengths="uniform:1:60")
    recording = run(workload, ExecutorSetup(blocks=5, block_size=16, seats=4))
    too_long = workload.prompt_lengths + workload.output_lengths - 1 > 80
    assert 0 < too_long.sum() < 20
    assert (recording.refused == too_long).all() and (recording.finished == ~too_long).all()
    assert "largest pool" in recording.refusal
    assert summarise(recording, SECOND).refused == too_long.sum()


def test_a_full_queue_refuses() -> None:
    recording = run(synthetic(10), ExecutorSetup(seats=1), config=SchedulerConfig(max_waiting=4))
    assert recording.refused.sum() == 6 and recording.finished.sum() == 4


CROWDED = ExecutorSetup(blocks=20, block_size=4, host_blocks=64, seats=8)
IMMEDIATE = SchedulerConfig(prefix_caching=False, admission=Admission.IMMEDIATE)


def crowded(config: SchedulerConfig) -> Recording:
    """More than the pool holds, admitted without looking ahead."""
    recording = run(synthetic(12, prompt_lengths="fixed:10", output_lengths="fixed:60"), CROWDED, config=config)
    check_everyone_served(recording)
    return recording


def test_preemption_is_counted_with_what_it_costs() -> None:
    recording = crowded(IMMEDIATE)
    assert recording.preemptions > 0 and recording.recomputed_tokens >= 10 * recording.preemptions
    assert not recording.iterations.column("swapped_blocks").any()


def test_swapping_recomputes_nothing_and_moves_blocks_both_ways() -> None:
    recording = crowded(replace(IMMEDIATE, preemption=Preemption.SWAP))
    moved = int(recording.iterations.column("swapped_blocks").sum())
    assert recording.preemptions > 0 and recording.recomputed_tokens == 0
    assert moved > 0 and moved % 2 == 0
    charged = CostModel("swap", ((1.0, 0, 0, 0, 0, 0.5),))
    slower = Simulation(replace(IMMEDIATE, preemption=Preemption.SWAP), CROWDED, charged, recording.workload).run()
    assert slower.end == pytest.approx(recording.end + 0.5 * moved)


def test_contiguous_kv_wastes_what_requests_allow_and_do_not_use() -> None:
    workload = synthetic(40, max_tokens="fixed:120")
    assert workload.submit(0, "m").params.max_tokens == 120 and not workload.submit(0, "m").params.ignore_eos
    paged, contiguous = (run(workload, config=SchedulerConfig(kv=layout)) for layout in KvLayout)
    check_everyone_served(paged)
    check_everyone_served(contiguous)
    assert summarise(paged, SECOND).kv_waste < 0.2 < 0.5 < summarise(contiguous, SECOND).kv_waste


def test_a_fair_order_narrows_the_gap_between_tenants() -> None:
    workload = synthetic(200, tenants=2, tenant_skew=3.0)
    gaps = []
    for discipline in (Discipline.FCFS, Discipline.FAIR):
        gaps.append(run(workload, ExecutorSetup(seats=4), config=SchedulerConfig(discipline=discipline)).fairness.gap)
    assert gaps[1] < gaps[0] / 2


def test_occupancy_predicts_the_gain_where_iterations_cost_the_same() -> None:
    workload = synthetic(64, prompt_lengths="fixed:4", output_lengths="uniform:1:80")
    few, many = (summarise(run(workload, ExecutorSetup(seats=seats)), SECOND) for seats in (4, 16))
    compared = gain(many, few)
    assert compared.measured > 2
    assert compared.predicted == pytest.approx(compared.measured, rel=1e-9)


def test_occupancy_predicts_what_changing_the_batch_at_every_iteration_gains() -> None:
    """Orca's argument, with every 80th request of the Azure conversation trace of 2023 (CC BY 4.0, Microsoft)."""
    trace = Path(__file__).parent / "data" / "azure_conversation.csv"
    workload = build(WorkloadSettings(trace=trace, arrivals="all-at-once"))
    cost, setup = load("yi-34b-2xa100"), ExecutorSetup(blocks=19_000, seats=16)
    held, free = (
        summarise(run(workload, setup, cost, SchedulerConfig(batching=batching)), cost)
        for batching in (Batching.REQUEST, Batching.ITERATION)
    )
    compared = gain(free, held)
    assert compared.measured > 1.5
    assert compared.predicted == pytest.approx(compared.measured, rel=0.05)
