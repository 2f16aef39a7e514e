"""Who is served next: classes and ageing, fairness among tenants, deadlines (C17, C18, C19 under each discipline)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from scheduler_svc.core import Lane, State
from scheduler_svc.core.config import Discipline
from tests.core.model_executor import card
from tests.core.stream import Stream
from tests.core.totals import totals
from tests.core.world import World

AGEING = [Discipline.PRIORITY, Discipline.FAIR, Discipline.DEADLINE]
TENANTS = ("f", "g")


def order_of_service(world: World, lane: Lane) -> list[int]:
    """Stream numbers in the order in which they enter an iteration."""
    order: list[int] = []
    while world.turn():
        order += [number for number in world.members(lane) if number not in order]
        world.deliver(lane)
    return order


# --- classes and ageing (C18, C19) ---


def iterations_until_class_5_starts(world: World, most: int) -> int:
    """Twice as many requests of class 0 as the seats can serve, and one of class 5 among them; 0.1 s an iteration."""
    world.submit(4, 4, ignore_eos=True)
    (low,) = world.submit(4, 4, priority=5, ignore_eos=True)
    for count in range(most):
        world.submit(4, 4, ignore_eos=True)
        world.iterate()
        if low.tokens:
            return count
        world.now += 0.1
    return most


@pytest.mark.parametrize("discipline", AGEING)
def test_ageing_bounds_the_wait_of_a_low_class(discipline: Discipline) -> None:
    """Five lifts, each seen by the next plan; then it is the oldest of the best class, and waits for one seat."""
    world = World(discipline=discipline, ageing_s=2.0)
    world.attach(seats=2)
    assert 50 <= iterations_until_class_5_starts(world, 1000) <= 5 * (20 + 1) + 4


@pytest.mark.parametrize(("discipline", "ageing_s"), [(Discipline.FCFS, 2.0), (Discipline.PRIORITY, 0.0)])
def test_strict_classes_starve_lower_ones(discipline: Discipline, ageing_s: float) -> None:
    world = World(discipline=discipline, ageing_s=ageing_s)
    world.attach(seats=2)
    assert iterations_until_class_5_starts(world, 600) == 600


@pytest.mark.parametrize("discipline", AGEING)
def test_ageing_counts_though_the_better_class_never_waits_when_it_is_looked_at(discipline: Discipline) -> None:
    """A request of class 0 arrives just before the one before it ends, and runs whenever a lift is due."""
    world = World(discipline=discipline, ageing_s=10.0)
    world.attach(seats=1)
    world.submit(4, 10, ignore_eos=True)
    low = None
    for i in range(100):
        if i == 5:
            (low,) = world.submit(4, 10, priority=5, ignore_eos=True)
        if i % 10 == 9:
            world.submit(4, 10, ignore_eos=True)
        world.iterate()
        world.now += 1.0
    assert low is not None and low.tokens


@pytest.mark.parametrize("discipline", AGEING)
def test_a_lifted_sequence_preempts_nobody_of_the_class_it_has_reached(discipline: Discipline) -> None:
    world = World(discipline=discipline, ageing_s=0.1)
    world.attach(seats=2)
    first = [world.submit(4, 20, ignore_eos=True)[0] for _ in range(2)]
    world.submit(4, 4, priority=5, ignore_eos=True)
    for _ in range(15):
        world.iterate()
        world.now += 0.1
    assert world.waiting()[0].rank == 0
    world.run()
    assert totals(world.scheduler).preemptions == 0 and all(stream.over for stream in first)


@pytest.mark.parametrize("discipline", Discipline)
def test_a_sequence_never_preempts_another_of_its_class(discipline: Discipline) -> None:
    """Whatever their tenants were served and their deadlines are."""
    world = World(discipline=discipline)
    world.attach(seats=1)
    (running,) = world.submit(4, 20, ignore_eos=True, tenant="f", deadline_ms=90_000)
    world.iterate()
    world.submit(4, 4, ignore_eos=True, tenant="g", deadline_ms=1000)
    while not running.over:
        assert world.sequence(running).state is State.RUNNING
        world.iterate()
    assert totals(world.scheduler).preemptions == 0
    world.run()


@pytest.mark.parametrize("discipline", Discipline)
def test_a_higher_class_preempts_the_last_of_the_lowest(discipline: Discipline) -> None:
    world = World(discipline=discipline)
    lane = world.attach(seats=3)
    middle, first, second = (world.submit(6, 30, priority=p, ignore_eos=True)[0] for p in (3, 5, 5))
    world.iterate()
    (high,) = world.submit(6, 4, ignore_eos=True)
    world.turn()
    assert set(world.members(lane)) == {middle.number, first.number, high.number}
    assert world.sequence(second).state is State.WAITING
    world.deliver(lane)
    world.run()


@pytest.mark.parametrize("discipline", Discipline)
def test_cached_requests_do_not_pass_a_cold_one_for_ever(discipline: Discipline) -> None:
    world = World(discipline=discipline)
    world.attach(blocks=40, seats=4)
    hot = [5 + i % 20 for i in range(20)]
    for _ in range(4):
        world.submit(hot, 4, ignore_eos=True)
    (cold,) = world.submit(30, 4, ignore_eos=True)
    for _ in range(8):
        world.submit(hot, 4, ignore_eos=True)
        world.iterate()
        world.now += 0.1
    assert cold.tokens


@pytest.mark.parametrize("discipline", Discipline)
def test_small_ones_do_not_pass_a_big_one_at_the_head(discipline: Discipline) -> None:
    """It needs nearly the whole pool; the small ones that came later wait with it."""
    world = World(discipline=discipline)
    world.attach(blocks=12, seats=8)
    world.submit(8, 8, ignore_eos=True)
    world.iterate()
    (big,) = world.submit(40, 2, ignore_eos=True)
    for _ in range(10):
        world.submit(4, 8, ignore_eos=True)
        world.iterate()
    assert big.tokens


@pytest.mark.parametrize("discipline", Discipline)
def test_a_long_prompt_stalls_nobody(discipline: Discipline) -> None:
    world = World(discipline=discipline)
    world.attach(blocks=4096, block_size=16, seats=64, budget=64, model=card(max_len=8192))
    (victim,) = world.submit(4, 600, ignore_eos=True)
    world.iterate()
    longs = [world.submit(4096, 1)[0] for _ in range(9)]
    for _ in range(10):
        world.iterate()
    (newcomer,) = world.submit(5, 1)
    for _ in range(4):
        world.iterate()
    assert newcomer.over and len(victim.tokens) == 15
    needed = 14
    while not any(long.over for long in longs):
        world.iterate()
        needed += 1
    assert needed <= -(-4096 // 63) + 4


@pytest.mark.parametrize("discipline", Discipline)
def test_short_prompts_leave_half_of_the_budget_to_a_long_one(discipline: Discipline) -> None:
    world = World(discipline=discipline)
    world.attach(blocks=512, block_size=16, seats=64, budget=64, model=card(max_len=512))
    (long,) = world.submit(400, 1)
    for _ in range(-(-400 // 32) + 1):
        for _ in range(5):
            world.submit(15, 1)
        world.iterate()
    assert long.over


@pytest.mark.parametrize("discipline", Discipline)
def test_without_chunks_shorter_prompts_do_not_pass_a_longer_one_for_ever(discipline: Discipline) -> None:
    world = World(discipline=discipline, chunked_prefill=False)
    world.attach(blocks=4096, block_size=16, seats=64, budget=64, model=card(max_len=512))
    world.submit(4, 200, ignore_eos=True)
    world.iterate()
    (longer,) = world.submit(60, 2, ignore_eos=True)
    for _ in range(4):
        world.submit(10, 2, ignore_eos=True)
        world.iterate()
    assert longer.tokens


# --- fairness among tenants (VTC, OSDI'24) ---

SEATS, SHORT, LONG = 4, (4, 6), (20, 16)
"""Prompt and answer of the two tenants' requests."""
BOUND = 2 * max(max(SHORT[0], LONG[0]), 2 * SEATS * sum(LONG))
"""2 max(w_p L_input, w_q M): M tokens are in the batch at most, a prompt token counts 1 and a generated one 2."""


class Contest:
    """Tenant f keeps twenty small requests waiting, tenant g two large ones."""

    def __init__(self, **changes: Any) -> None:
        self.world = World(prefix_caching=False, **changes)
        self.world.attach(blocks=200, seats=SEATS, budget=64)
        self.streams: dict[str, list[Stream]] = {tenant: [] for tenant in TENANTS}
        self.open: dict[str, list[Stream]] = {tenant: [] for tenant in TENANTS}
        self.done = dict.fromkeys(TENANTS, 0)

    def service(self, tenant: str) -> int:
        """What a tenant has got: prompts that were admitted, and twice what was generated."""
        self.done[tenant] += sum(len(s.prompt) + 2 * len(s.tokens) for s in self.open[tenant] if s.over)
        self.open[tenant] = [stream for stream in self.open[tenant] if not stream.over]
        going = [s for s in self.open[tenant] if self.world.sequence(s).admitted >= 0]
        return self.done[tenant] + sum(len(s.prompt) + 2 * len(s.tokens) for s in going)

    def run(self, iterations: int, *, g: bool = True, weight: float = 1.0) -> list[float]:
        """How far f is ahead of g after each iteration, in service over weight; g's weight is 1."""
        leads = []
        for _ in range(iterations):
            waiting = Counter(sequence.tenant for sequence in self.world.scheduler.queues["m"])
            for _ in range(20 - waiting["f"]):
                self.open["f"] += self.world.submit(*SHORT, tenant="f", ignore_eos=True)
            for _ in range(2 - waiting["g"] if g else 0):
                self.open["g"] += self.world.submit(*LONG, tenant="g", ignore_eos=True)
            self.world.iterate()
            leads.append(self.service("f") / weight - self.service("g"))
        return leads


def spread(leads: list[float]) -> float:
    """The most by which one got more than the other in any stretch of time."""
    return max(leads) - min(leads)


def test_tenants_get_equal_service_within_the_bound() -> None:
    contest = Contest(discipline=Discipline.FAIR)
    leads = contest.run(700)
    assert spread(leads) <= BOUND and contest.done["f"] + contest.done["g"] > 6 * BOUND


def test_first_come_first_served_breaks_that_bound() -> None:
    assert spread(Contest(discipline=Discipline.FCFS).run(700)) > 2 * BOUND


def test_weights_are_shares() -> None:
    contest = Contest(discipline=Discipline.FAIR, tenant_weights={"f": 3.0})
    leads = contest.run(700, weight=3.0)
    assert spread(leads) <= BOUND
    assert 2.4 < contest.service("f") / contest.service("g") < 3.6


def test_an_idle_tenant_earns_no_credit() -> None:
    contest = Contest(discipline=Discipline.FAIR)
    contest.run(50)
    alone = contest.run(250, g=False)
    assert spread(alone) > 2 * BOUND, "f was served alone"
    assert spread(contest.run(300)) <= BOUND


# --- deadlines ---


def test_the_earliest_deadline_is_first_within_a_class() -> None:
    world = World(discipline=Discipline.DEADLINE)
    lane = world.attach(seats=1)
    wishes = [(9000, 0), (5000, 0), (7000, 0), (100_000, -1), (1000, 2), (0, 0)]
    streams = [world.submit(4, 2, deadline_ms=ms, priority=p, ignore_eos=True)[0] for ms, p in wishes]
    assert order_of_service(world, lane) == [streams[i].number for i in (3, 1, 2, 0, 5, 4)]


def test_who_is_late_comes_after_those_who_can_still_make_it() -> None:
    world = World(discipline=Discipline.DEADLINE)
    lane = world.attach(seats=1)
    world.submit(4, 2, priority=-5, ignore_eos=True)
    wishes = [(2000, 0), (1000, 0), (9000, 0), (500, 1), (8000, 1)]
    streams = [world.submit(4, 2, deadline_ms=ms, priority=p, ignore_eos=True)[0] for ms, p in wishes]
    world.iterate()
    world.now += 3.0
    order = order_of_service(world, lane)[1:]
    assert order == [streams[i].number for i in (2, 1, 0, 4, 3)]


def test_who_is_late_does_not_wait_for_ever() -> None:
    """Requests that can still make it keep coming, twice as many as can be served; 0.1 s an iteration."""
    world = World(discipline=Discipline.DEADLINE, ageing_s=2.0)
    world.attach(seats=2)
    world.submit(4, 20, priority=-1, n=2, ignore_eos=True)
    world.iterate()
    (late,) = world.submit(4, 4, deadline_ms=500, ignore_eos=True)
    started = 0
    for count in range(200):
        world.submit(4, 4, deadline_ms=90_000, ignore_eos=True)
        world.iterate()
        world.now += 0.1
        if late.tokens and not started:
            started = count
    assert 20 <= started <= 5 + 20 + 4 + 1


def test_ageing_of_many_classes_looks_at_them_once_a_plan() -> None:
    """4,096 priorities, as any client may send, once cost a plan 0.7 s each time they aged."""
    looked = 0

    class Counted(dict[int, int]):
        def __iter__(self) -> Iterator[int]:
            nonlocal looked
            looked += 1
            return super().__iter__()

    world = World(discipline=Discipline.PRIORITY, ageing_s=1.0, max_num_seqs=1)
    world.attach(20)
    for priority in range(50):
        world.submit(4, 2, priority=priority)
    queue = world.scheduler.queues["m"]
    queue._classes = Counted(queue._classes)  # type: ignore[assignment]
    world.now += 1.5
    queue.refresh(world.now)
    assert looked == 1 and {sequence.rank for sequence in queue} == set(range(49))


def test_an_ageing_below_the_clocks_resolution_ends() -> None:
    """It once kept the core in an endless loop."""
    world = World(discipline=Discipline.PRIORITY, ageing_s=1e-13, max_num_seqs=1)
    world.attach(20)
    world.now = 5000.0
    world.submit(4, 2)
    world.submit(4, 2, priority=3)
    world.run()
    world.check_idle()


def test_an_endless_row_of_new_tenants_keeps_nobody_out() -> None:
    """Each began at the lowest counter that waited, which so never rose: who was ahead of it once waited for ever."""
    world = World(discipline=Discipline.FAIR)
    world.attach(seats=1, budget=16)
    world.submit(12, 3, tenant="served before", ignore_eos=True)
    world.run()
    for i in range(2):
        world.submit(8, 2, tenant=f"new {i}", ignore_eos=True)
    (back,) = world.submit(8, 2, tenant="served before", ignore_eos=True)
    for i in range(2, 100):
        world.submit(8, 2, tenant=f"new {i}", ignore_eos=True)
        world.iterate()
        world.iterate()
    assert back.over
