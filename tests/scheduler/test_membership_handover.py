"""Hand-overs as executors see them: the orders with their secrets, answers that come, and answers that do not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.wire import Drain, Fetch, Fetched, Leaving, Lend, Recall, Reset, TransferPoint
from scheduler_svc.core import SchedulerConfig
from scheduler_svc.core.config import Handover
from scheduler_svc.tickets import Tickets
from tests.scheduler.test_membership import Rig, hello, result

SOURCE, TARGET = b"p", b"q"


class HandoverRig(Rig):
    """A stream has had its first token on one of two executors, which is leaving, or was drained by an operator."""

    def __init__(self, *, leaves: bool = True) -> None:
        super().__init__()
        self.scheduler.handovers._config = SchedulerConfig(handover=Handover.ALWAYS)
        point = TransferPoint("tcp://127.0.0.1:9", b"k" * 40, layout=b"l", block_bytes=64)
        self.receive(SOURCE, replace(hello("source"), transfer=point))
        self.source = next(iter(self.scheduler.lanes))
        self.stream = self.submit()
        plan = self.plan()
        self.receive(
            TARGET, replace(hello("target", incarnation=b"j"), transfer=replace(point, address="tcp://[::1]:8"))
        )
        self.target = max(self.scheduler.lanes)
        if leaves:
            self.receive(SOURCE, Leaving(self.source, "SIGTERM"))
        else:
            self.scheduler.pause(self.scheduler.lanes[self.source], 0.0)
        self.receive(SOURCE, result(plan, 7))
        self.membership.plan_idle_lanes(0.0)

    @property
    def fetch(self) -> Fetch:
        fetch = self.last(Fetch, TARGET)
        assert isinstance(fetch, Fetch)
        return fetch


@pytest.fixture
def rig() -> HandoverRig:
    return HandoverRig()


def test_both_sides_get_the_same_secret_and_the_target_the_source_s_address(rig: HandoverRig) -> None:
    lend = rig.last(Lend, SOURCE)
    assert isinstance(lend, Lend) and (lend.epoch, rig.fetch.epoch) == (rig.source, rig.target)
    assert lend.secret == rig.fetch.secret and len(lend.secret) == 16 and lend.ticket == rig.fetch.ticket
    assert (rig.fetch.address, rig.fetch.key) == ("tcp://127.0.0.1:9", b"k" * 40)
    assert len(lend.blocks) == len(rig.fetch.blocks) == 2
    other = HandoverRig()
    assert other.fetch.secret != lend.secret


def test_the_sequence_goes_on_with_its_kv_and_the_source_is_let_go(rig: HandoverRig) -> None:
    assert not [message for peer, message in rig.sent if isinstance(message, Drain)]
    rig.receive(TARGET, Fetched(rig.target, rig.fetch.ticket, True, busy_us=1000))
    plan = rig.plan()
    (new,) = plan.new
    assert plan.epoch == rig.target and new.tokens.tolist() == [0, 1, 2, 3, 4, 5, 7] and new.computed == 6
    assert new.blocks.tolist() == rig.fetch.blocks.tolist()
    assert rig.last(Drain, SOURCE) == Drain(rig.source)
    rig.receive(TARGET, result(plan, 8))
    assert rig.streamed(rig.stream) == [7, 8]


def test_an_executor_is_paused_when_nobody_reads_its_kv_any_more() -> None:
    """An operator may stop one that is paused."""
    rig = HandoverRig(leaves=False)
    source = next(e for e in rig.membership.executors if e.name == "source")
    assert source.lane.num_running == 0 and source.state == "draining"
    rig.receive(TARGET, Fetched(rig.target, rig.fetch.ticket, True))
    assert source.state == "paused"


def test_after_a_failure_it_is_computed_anew(rig: HandoverRig) -> None:
    rig.receive(TARGET, Fetched(rig.target, rig.fetch.ticket, False, "the source is silent"))
    (new,) = rig.plan().new
    assert new.computed == 0 and new.tokens.tolist() == [0, 1, 2, 3, 4, 5, 7]


@pytest.mark.parametrize("kind", ["repeated", "another epoch", "unknown ticket", "the source's"])
def test_an_answer_that_is_not_awaited_is_dropped(rig: HandoverRig, kind: str) -> None:
    answer = Fetched(rig.target, rig.fetch.ticket, False)
    peer = TARGET
    match kind:
        case "repeated":
            rig.receive(TARGET, replace(answer, done=True))
        case "another epoch":
            answer = replace(answer, epoch=1)
        case "unknown ticket":
            answer = replace(answer, ticket=99)
        case "the source's":
            answer, peer = replace(answer, epoch=rig.source), SOURCE
    failed = rig.scheduler.counters.handovers_failed
    rig.receive(peer, answer)
    assert rig.scheduler.counters.handovers_failed == failed and len(rig.scheduler.lanes) == 2
    rig.scheduler.check_invariants()


def test_a_target_that_never_answers_loses_its_epoch(rig: HandoverRig) -> None:
    """Nobody could say else when its blocks may be used again."""
    patience = 3.0 + rig.fetch.timeout_ms / 1000
    for now, is_lost in ((patience - 0.1, False), (patience + 0.1, True)):
        for executor in rig.membership._by_peer.values():
            executor.alive_at = now
        rig.membership.check(now)
        assert (rig.target not in rig.scheduler.lanes) == is_lost
    assert isinstance(rig.last(Reset, TARGET), Reset)
    rig.attach(b"r", name="third", incarnation=b"k")
    assert rig.plan().new[0].computed == 0


def test_when_the_source_is_lost_the_target_is_told_to_give_up(rig: HandoverRig) -> None:
    rig.gone.add(SOURCE)
    rig.membership.connection_broken(0.0)
    rig.membership.check(0.1)
    rig.membership.plan_idle_lanes(0.1)
    assert rig.last(Recall, TARGET) == Recall(rig.target, rig.fetch.ticket)
    rig.receive(TARGET, Fetched(rig.target, rig.fetch.ticket, True))
    assert rig.plan().new[0].computed == 6, "all had come before"


def test_a_target_that_cannot_be_told_is_lost(rig: HandoverRig) -> None:
    rig.scheduler.handovers.orders.append(Recall(rig.target, rig.fetch.ticket))
    rig.gone.add(TARGET)
    rig.membership.plan_idle_lanes(0.0)
    assert rig.target not in rig.scheduler.lanes


def test_one_fetch_waits_behind_another() -> None:
    tickets = Tickets(answer_within_s=10.0)
    for ticket in (1, 2):
        tickets.open(Fetch(5, ticket, b"", "a", b"", [], 2000), 100.0)
    assert not tickets.is_overdue(5, 111.0) and tickets.is_overdue(5, 112.1)
    assert tickets.close(Fetched(5, 1, True)) and not tickets.close(Fetched(5, 1, True))
    assert not tickets.is_overdue(5, 113.9) and tickets.is_overdue(5, 114.1)
    tickets.excuse(100.0)
    assert not tickets.is_overdue(5, 213.9) and tickets.is_overdue(5, 214.1), "what nobody could hear is not late"
    tickets.forget(5)
    assert not tickets.is_overdue(5, 1e9) and not tickets.close(Fetched(5, 2, True))
