"""Membership of executors: attach, refusal, epochs, signs of life, deadlines, junk. The sockets are a list."""

from __future__ import annotations

import msgpack
import numpy as np
import pytest

from common.wire import (
    PROTOCOL_VERSION,
    Alive,
    Drain,
    Ended,
    EndReason,
    Fault,
    Hello,
    Leaving,
    Limits,
    Message,
    ModelCard,
    Plan,
    Refused,
    Reset,
    Result,
    SamplingParams,
    Submit,
    Tokens,
    Welcome,
    decode,
    encode,
)
from scheduler_svc.core import Scheduler, SchedulerConfig
from scheduler_svc.membership import Membership

LIMITS = Limits(block_size=4, num_blocks=64, num_host_blocks=0, max_num_seqs=8, max_num_batched_tokens=64)


def hello(
    name: str = "one", *, protocol: int = PROTOCOL_VERSION, incarnation: bytes = b"i", weights: bytes = b"w"
) -> Hello:
    card = ModelCard("m", weights, 100, 64, (1,), "float32")
    return Hello(protocol, name, incarnation, "cpu", LIMITS, card)


class Rig:
    """A membership whose sent messages are kept by peer."""

    def __init__(self) -> None:
        self.scheduler = Scheduler(SchedulerConfig(hold_s=5.0))
        self.sent: list[tuple[bytes, Message]] = []
        self.gone: set[bytes] = set()
        self.membership = Membership(
            self.scheduler, self._send, heartbeat_ms=100, heartbeat_timeout_s=1.0, iteration_timeout_s=3.0
        )
        self._num_streams = 0

    def _send(self, peer: bytes, data: bytes) -> bool:
        if peer in self.gone:
            return False
        self.sent.append((peer, decode(data)))
        return True

    def receive(self, peer: bytes, message: Message, now: float = 0.0) -> None:
        self.membership.receive(peer, encode(message), now)

    def last(self, kind: type[Message], peer: bytes | None = None) -> Message:
        return next(m for p, m in reversed(self.sent) if isinstance(m, kind) and peer in (None, p))

    def attach(self, peer: bytes = b"p", **changes: object) -> int:
        self.receive(peer, hello(**changes))  # type: ignore[arg-type]
        welcome = self.last(Welcome, peer)
        assert isinstance(welcome, Welcome)
        return welcome.epoch

    def submit(self, max_tokens: int = 5) -> int:
        self._num_streams += 1
        prompt = np.arange(6, dtype=np.int32)
        params = SamplingParams(max_tokens=max_tokens)
        self.scheduler.submit(0, Submit(self._num_streams, 1, "r", "m", prompt, params), 0.0)
        return self._num_streams

    def plan(self, now: float = 0.0) -> Plan:
        self.membership.plan_idle_lanes(now)
        plan = self.last(Plan)
        assert isinstance(plan, Plan)
        return plan

    def ended(self) -> list[Ended]:
        return [m for _, m in self.scheduler.outbox if isinstance(m, Ended)]

    def streamed(self, stream: int) -> list[int]:
        tokens = [m for _, m in self.scheduler.outbox if isinstance(m, Tokens)]
        return [int(t) for m in tokens for s, t in zip(m.streams, m.tokens, strict=True) if s == stream]


def result(plan: Plan, *tokens: int, finish: int = 0) -> Result:
    return Result(plan.epoch, plan.iteration, np.array(tokens, np.int32), np.array([finish] * len(tokens), np.uint8))


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_hello_is_welcomed_once_and_repeated_hellos_keep_the_epoch(rig: Rig) -> None:
    epoch = rig.attach()
    assert rig.attach() == epoch
    assert len(rig.scheduler.lanes) == 1


def test_another_protocol_is_refused_for_good_and_says_why(rig: Rig) -> None:
    rig.receive(b"p", hello(protocol=PROTOCOL_VERSION + 1))
    refused = rig.last(Refused)
    assert isinstance(refused, Refused) and not refused.retry
    assert str(PROTOCOL_VERSION) in refused.reason and str(PROTOCOL_VERSION + 1) in refused.reason


def test_a_hello_that_cannot_be_read_is_refused_with_both_versions(rig: Rig) -> None:
    rig.membership.receive(b"p", msgpack.packb([Hello.kind, 99, {"fields": "of another time"}]), 0.0)
    refused = rig.last(Refused)
    assert isinstance(refused, Refused) and not refused.retry and "99" in refused.reason
    assert rig.membership.num_junk == 0


def test_models_that_nobody_serves_are_forgotten_before_there_are_too_many(rig: Rig) -> None:
    for i in range(100):
        card = ModelCard(f"model-{i}", b"w", 100, 64, (1,), "float32")
        rig.receive(b"p%d" % i, Hello(PROTOCOL_VERSION, f"e{i}", b"i%d" % i, "cpu", LIMITS, card))
        executor = rig.membership._by_peer[b"p%d" % i]
        rig.membership.lose(executor, float(i), "gone")
    assert len(rig.scheduler.availability.models) <= 64 and "model-99" in rig.scheduler.availability.models


def test_what_the_scheduler_slept_through_is_no_silence_and_no_lateness(rig: Rig) -> None:
    rig.attach()
    rig.submit()
    rig.plan()
    executor = rig.membership.executors[0]
    executor.deadline = 3.0
    rig.membership.excuse(100.0, 100.0)
    assert rig.membership.check(100.9) is not None and rig.scheduler.lanes
    executor.alive_at = 103.0
    assert rig.membership.check(102.9) is not None and rig.scheduler.lanes
    rig.membership.check(103.1)
    assert not rig.scheduler.lanes, "what comes too late afterwards does"


def test_a_taken_name_is_refused_while_its_owner_lives_and_free_afterwards(rig: Rig) -> None:
    rig.attach(b"p")
    rig.receive(b"q", hello(incarnation=b"j"))
    assert isinstance(rig.sent[-1][1], Refused) and rig.sent[-1][1].retry
    rig.membership.check(now=1.5)
    assert not rig.scheduler.lanes
    rig.receive(b"q", hello(incarnation=b"j"), now=1.5)
    assert isinstance(rig.sent[-1][1], Welcome)


def test_the_same_process_dialling_anew_replaces_its_old_attachment(rig: Rig) -> None:
    first = rig.attach(b"p")
    second = rig.attach(b"q")
    assert second > first and list(rig.scheduler.lanes) == [second]


def test_other_weights_beside_a_lane_of_the_same_model_are_refused(rig: Rig) -> None:
    rig.attach(b"p")
    rig.receive(b"q", hello("two", weights=b"v"))
    refused = rig.sent[-1][1]
    assert isinstance(refused, Refused) and "fingerprint" in refused.reason


def test_a_repeated_result_changes_nothing(rig: Rig) -> None:
    rig.attach()
    stream = rig.submit()
    plan = rig.plan()
    for _ in range(3):
        rig.receive(b"p", result(plan, 7))
    assert rig.streamed(stream) == [7]
    assert len(rig.scheduler.lanes) == 1


def test_a_result_of_an_old_epoch_is_never_credited(rig: Rig) -> None:
    rig.attach(b"p")
    stream = rig.submit()
    old = rig.plan()
    rig.gone.add(b"p")
    rig.membership.connection_broken(0.0)
    rig.membership.check(now=0.1)
    rig.attach(b"q", incarnation=b"j")
    new = rig.plan()
    assert new.epoch > old.epoch
    rig.receive(b"p", result(old, 9))
    rig.receive(b"q", result(old, 9))
    assert rig.streamed(stream) == []
    rig.receive(b"q", result(new, 7))
    assert rig.streamed(stream) == [7]


@pytest.mark.parametrize(
    "tokens, finish",
    [((7, 7), 0), ((), 0), ((100,), 0), ((-1,), 0), ((7,), 9)],
    ids=["too many rows", "too few rows", "beyond the vocabulary", "negative", "unknown finish code"],
)
def test_an_impossible_result_ends_the_epoch_and_loses_no_request(
    rig: Rig, tokens: tuple[int, ...], finish: int
) -> None:
    rig.attach(b"p")
    stream = rig.submit()
    rig.receive(b"p", result(rig.plan(), *tokens, finish=finish))
    assert not rig.scheduler.lanes and isinstance(rig.last(Reset, b"p"), Reset)
    assert rig.ended() == [] and rig.streamed(stream) == []
    rig.attach(b"q")
    rig.receive(b"q", result(rig.plan(), 7))
    assert rig.streamed(stream) == [7]
    rig.scheduler.check_invariants()


def test_a_row_that_goes_on_past_its_limit_ends_the_epoch(rig: Rig) -> None:
    rig.attach()
    rig.submit(max_tokens=1)
    rig.receive(b"p", result(rig.plan(), 7))
    assert not rig.scheduler.lanes


def test_silence_ends_the_epoch_and_a_sign_of_life_prevents_it(rig: Rig) -> None:
    epoch = rig.attach()
    rig.receive(b"pulse", Alive(epoch), now=0.9)
    rig.membership.check(now=1.5)
    assert rig.scheduler.lanes
    assert rig.sent[-1] == (b"pulse", Alive(epoch))
    rig.membership.check(now=2.0)
    assert not rig.scheduler.lanes


def test_a_sign_of_life_under_an_ended_epoch_is_answered_with_zero(rig: Rig) -> None:
    rig.receive(b"pulse", Alive(77))
    assert rig.sent == [(b"pulse", Alive(0))]


def test_an_iteration_past_its_deadline_ends_the_epoch(rig: Rig) -> None:
    epoch = rig.attach()
    rig.submit()
    rig.plan(now=0.0)
    for now in (1.0, 2.0, 3.0):
        rig.receive(b"pulse", Alive(epoch), now)
        rig.membership.check(now)
    assert rig.scheduler.lanes
    rig.receive(b"pulse", Alive(epoch), 3.1)
    rig.membership.check(now=3.1)
    assert not rig.scheduler.lanes


def test_a_fault_ends_the_guilty_sequence_alone(rig: Rig) -> None:
    rig.attach(b"p")
    guilty, innocent = rig.submit(), rig.submit()
    plan = rig.plan()
    slots = {item.slot: i for i, item in enumerate(plan.new)}
    assert len(slots) == 2
    rig.receive(b"p", Fault(plan.epoch, plan.iteration, np.array([plan.new[0].slot], np.uint16), "nan", "not finite"))
    (end,) = rig.ended()
    assert (end.stream, end.reason) == (guilty, EndReason.FAILED) and "not finite" in end.message
    rig.attach(b"q")
    rig.receive(b"q", result(rig.plan(), 7))
    assert rig.streamed(innocent) == [7]


def test_a_sequence_whose_plans_always_fail_ends_with_an_error(rig: Rig) -> None:
    rig.attach(b"0")
    stream = rig.submit()
    for attempt in range(10):
        if rig.ended():
            break
        peer = str(attempt).encode()
        if attempt:
            rig.attach(peer)
        plan = rig.plan()
        rig.receive(peer, Fault(plan.epoch, plan.iteration, np.empty(0, np.uint16), "oom", "out of memory"))
    (end,) = rig.ended()
    assert (end.stream, end.reason) == (stream, EndReason.FAILED) and "out of memory" in end.message
    assert attempt == rig.scheduler.config.max_strikes


def test_only_the_poisonous_one_of_many_ends(rig: Rig) -> None:
    """A plan that reaches its 41st token kills the executor; the first chunks do not. Its mates get their answers."""
    poison = 77
    rig.attach(b"0")
    streams = [rig.submit(max_tokens=3) for _ in range(5)]
    prompt = np.full(60, poison, np.int32)
    rig.scheduler.submit(0, Submit(500, 1, "bad", "m", prompt, SamplingParams(max_tokens=3)), 0.0)
    streams += [rig.submit(max_tokens=3) for _ in range(5)]
    attached, deaths = b"0", 0
    resident: dict[int, tuple[bool, int, int]] = {}
    for step in range(200):
        if not rig.scheduler.live:
            break
        plan = rig.plan(now=float(step))
        for item in plan.new:
            resident[item.slot] = (poison in item.tokens.tolist(), item.computed, len(item.tokens))
        deadly = False
        rows = [(slot, 1) for slot in plan.decodes.tolist()]
        ends = len(rows)
        for slot, chunk in zip(plan.prefills.tolist(), plan.prefill_lengths.tolist(), strict=True):
            is_poison, computed, length = resident[slot]
            deadly |= is_poison and computed + chunk > 40
            resident[slot] = (is_poison, computed + chunk, length)
            ends += computed + chunk == length
        if deadly:
            deaths += 1
            rig.gone.add(attached)
            rig.membership.connection_broken(float(step))
            rig.membership.check(float(step))
            attached, resident = str(deaths).encode(), {}
            rig.attach(attached, incarnation=attached)
            continue
        lane = next(iter(rig.scheduler.lanes.values()))
        flight = lane.in_flight
        assert flight is not None
        finishing = [s.slot for s, c in flight.prefills if lane.computed[s.slot] + c == lane.length[s.slot]]
        slots = [*plan.decodes.tolist(), *finishing]
        finish = [3 if lane.length[s] + 1 >= lane.max_length[s] else 0 for s in slots]
        outcome = Result(plan.epoch, plan.iteration, np.full(len(slots), 7, np.int32), np.array(finish, np.uint8))
        rig.receive(attached, outcome, float(step))
    failed = [e.stream for e in rig.ended() if e.reason == EndReason.FAILED]
    assert failed == [500]
    assert all(rig.streamed(stream) == [7, 7, 7] for stream in streams)
    assert deaths == rig.scheduler.config.max_strikes


def test_a_leaving_executor_hands_its_sequences_over_and_is_let_go(rig: Rig) -> None:
    epoch = rig.attach(b"p")
    stream = rig.submit()
    plan = rig.plan()
    rig.attach(b"q", name="two", incarnation=b"j")
    rig.receive(b"p", Leaving(epoch, "SIGTERM"))
    rig.receive(b"p", result(plan, 7))
    rig.membership.plan_idle_lanes(0.0)
    assert rig.last(Drain, b"p") == Drain(epoch)
    moved = rig.last(Plan, b"q")
    assert isinstance(moved, Plan) and moved.new[0].tokens.tolist() == [0, 1, 2, 3, 4, 5, 7]
    assert rig.streamed(stream) == [7]


def test_a_leaving_executor_without_a_substitute_finishes_its_sequences(rig: Rig) -> None:
    epoch = rig.attach(b"p")
    stream = rig.submit(max_tokens=2)
    plan = rig.plan()
    rig.receive(b"p", Leaving(epoch, "SIGTERM"))
    waiting = rig.submit()
    rig.receive(b"p", result(plan, 7))
    rig.receive(b"p", result(rig.plan(), 8, finish=3))
    rig.membership.plan_idle_lanes(0.0)
    assert rig.last(Drain, b"p") == Drain(epoch)
    assert rig.streamed(stream) == [7, 8] and rig.streamed(waiting) == []
    assert [e.stream for e in rig.ended()] == [stream]


@pytest.mark.parametrize("junk", [b"", b"\x45", b"\x92\x01", b"\xc1", b"\xdd\xff\xff\xff\xff", encode(Plan(1, 1))])
def test_junk_from_a_stranger_harms_nobody(rig: Rig, junk: bytes) -> None:
    rig.attach(b"p")
    rig.submit()
    plan = rig.plan()
    rig.membership.receive(b"stranger", junk, 0.0)
    assert rig.membership.num_junk == 1
    rig.receive(b"p", result(plan, 7))
    assert len(rig.scheduler.lanes) == 1


def test_junk_from_an_executor_ends_its_epoch(rig: Rig) -> None:
    rig.attach(b"p")
    rig.membership.receive(b"p", b"\xc1", 0.0)
    assert not rig.scheduler.lanes and isinstance(rig.last(Reset, b"p"), Reset)


def test_when_no_executor_comes_the_waiting_end_after_the_hold_time(rig: Rig) -> None:
    rig.attach(b"p")
    stream = rig.submit()
    rig.plan()
    rig.gone.add(b"p")
    rig.membership.connection_broken(0.0)
    rig.membership.check(now=0.9)
    assert rig.scheduler.expire(now=5.8) == pytest.approx(5.9)
    assert rig.ended() == []
    rig.scheduler.expire(now=6.1)
    assert [(e.stream, e.reason) for e in rig.ended()] == [(stream, EndReason.NO_EXECUTOR)]
    rig.submit()
    # Long after the loss a new request is answered at once, not held.
    rig.scheduler.submit(0, Submit(99, 1, "r", "m", np.arange(3, dtype=np.int32), SamplingParams(max_tokens=1)), 7.0)
    assert rig.ended()[-1].stream == 99
