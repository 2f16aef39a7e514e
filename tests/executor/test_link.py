"""The conversation with the scheduler, against a scripted ROUTER."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import pytest

from common.wire import (
    PROTOCOL_VERSION,
    Alive,
    Drain,
    Fault,
    Hello,
    Leaving,
    Plan,
    Refused,
    Reset,
    Result,
    Welcome,
    encode,
)
from executor_svc.fake import FakeExecutor, ScriptedLink
from executor_svc.link import RefusedError
from executor_svc.script import Action, Script
from tests.executor.plans import decode_plan, new_sequence, prefill_plan
from tests.executor.scripted_scheduler import ScriptedScheduler


@pytest.fixture
def fake(scheduler: ScriptedScheduler) -> Iterator[FakeExecutor]:
    with FakeExecutor(scheduler.address, scheduler_timeout_s=1.0) as executor:
        yield executor


def attach(scheduler: ScriptedScheduler, fake: FakeExecutor, epoch: int = 1) -> None:
    times = len(fake.epochs)
    scheduler.welcome(epoch)
    fake.wait_attached(times + 1)


def serve_one(scheduler: ScriptedScheduler, epoch: int, iteration: int = 1) -> Result:
    """Admit a sequence into slot 0 of a fresh epoch and take its first token."""
    scheduler.send(prefill_plan(iteration, new_sequence(0, [5, 6, 7], [2]), epoch=epoch))
    return scheduler.receive(Result)


def test_attach_and_run_plans(scheduler: ScriptedScheduler, fake: FakeExecutor) -> None:
    hello = scheduler.welcome(epoch=1)
    assert (hello.protocol, hello.name, len(hello.incarnation)) == (PROTOCOL_VERSION, "fake", 16)
    first = serve_one(scheduler, epoch=1)
    assert (first.epoch, first.iteration, len(first.tokens)) == (1, 1, 1)
    scheduler.send(decode_plan(2, 0))
    assert scheduler.receive(Result).iteration == 2


def test_hello_is_repeated_until_answered(scheduler: ScriptedScheduler, fake: FakeExecutor) -> None:
    first = scheduler.receive(Hello)
    assert scheduler.receive(Hello) == first
    assert scheduler.receive(Hello) == first
    attach(scheduler, fake)


def test_waits_for_a_scheduler_that_is_not_up_yet() -> None:
    probe = ScriptedScheduler()
    port = probe.port
    probe.close()
    with FakeExecutor(f"tcp://127.0.0.1:{port}") as fake:
        late = ScriptedScheduler(port)
        attach(late, fake)
        assert len(serve_one(late, epoch=1).tokens) == 1
        late.close()


def test_a_connection_on_which_nobody_answers_is_dialled_anew(scheduler: ScriptedScheduler) -> None:
    """Such as one that a box on the way holds open, though nothing comes through it any more."""
    with FakeExecutor(scheduler.address, scheduler_timeout_s=0.3, hello_interval_s=0.1) as fake:
        peers = set()
        while len(peers) < 2:
            scheduler.receive(Hello)
            peers.add(scheduler.peer)
            assert scheduler.num_hellos < 50
        attach(scheduler, fake)


def test_a_welcome_on_a_connection_that_is_being_given_up_is_not_taken(
    scheduler: ScriptedScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one that comes just when nobody waits for it any more: its connection is closed, the next asks."""
    receive = ScriptedLink._receive

    def too_late(link: ScriptedLink) -> None:
        monkeypatch.setattr(ScriptedLink, "_receive", receive)
        link._redial()
        link._receive()

    monkeypatch.setattr(ScriptedLink, "_receive", too_late)
    with FakeExecutor(scheduler.address, hello_interval_s=0.1) as fake:
        scheduler.welcome(epoch=1)
        given_up = scheduler.peer
        while scheduler.peer == given_up:
            scheduler.receive(Hello)
        attach(scheduler, fake, epoch=2)
        assert serve_one(scheduler, epoch=2).epoch == 2


def test_refused_for_good_ends_it(scheduler: ScriptedScheduler, fake: FakeExecutor) -> None:
    scheduler.receive(Hello)
    scheduler.send(Refused("protocol 9 is spoken here", retry=False))
    fake.join()
    assert isinstance(fake.error, RefusedError) and "protocol 9" in str(fake.error)


def test_refused_for_now_asks_again(scheduler: ScriptedScheduler, fake: FakeExecutor) -> None:
    scheduler.receive(Hello)
    scheduler.send(Refused("the name is taken", retry=True))
    attach(scheduler, fake)


def test_reset_drops_all_state_and_says_hello(scheduler: ScriptedScheduler, fake: FakeExecutor) -> None:
    attach(scheduler, fake)
    serve_one(scheduler, epoch=1)
    scheduler.send(Reset(1, "because"))
    attach(scheduler, fake, epoch=2)
    assert not fake.runner.state.columns.live.any()
    # The same slot and generation are new again: nothing of the old epoch is left.
    assert serve_one(scheduler, epoch=2).epoch == 2


def test_messages_of_an_ended_epoch_are_dropped(scheduler: ScriptedScheduler, fake: FakeExecutor) -> None:
    attach(scheduler, fake)
    scheduler.send(Reset(1, "because"))
    attach(scheduler, fake, epoch=2)
    scheduler.send(prefill_plan(1, new_sequence(0, [1, 2], [0]), epoch=1), Reset(1, "again"), Drain(1))
    assert serve_one(scheduler, epoch=2).epoch == 2
    assert fake.link.junk["stale"] == 3
    assert len(fake.plans) == 1


def test_a_plan_delivered_twice_runs_once(scheduler: ScriptedScheduler, fake: FakeExecutor) -> None:
    attach(scheduler, fake)
    serve_one(scheduler, epoch=1)
    scheduler.send(decode_plan(2, 0), decode_plan(2, 0), decode_plan(3, 0))
    assert [scheduler.receive(Result).iteration for _ in range(2)] == [2, 3]
    assert fake.link.junk["repeated"] == 1
    assert fake.runner.state.length[0] == 3 + 3


def test_a_missing_plan_is_a_fault(scheduler: ScriptedScheduler, fake: FakeExecutor) -> None:
    attach(scheduler, fake)
    serve_one(scheduler, epoch=1)
    scheduler.send(decode_plan(3, 0))
    assert scheduler.receive(Fault).reason == "order"


def test_after_a_fault_it_waits_for_the_reset(scheduler: ScriptedScheduler, fake: FakeExecutor) -> None:
    attach(scheduler, fake)
    scheduler.send(decode_plan(1, 0))
    fault = scheduler.receive(Fault)
    assert (fault.epoch, fault.iteration, fault.reason, fault.slots.tolist()) == (1, 1, "plan", [0])
    scheduler.send(prefill_plan(2, new_sequence(0, [1, 2], [0])), Reset(1, "fault"))
    attach(scheduler, fake, epoch=2)
    assert len(fake.plans) == 1
    assert serve_one(scheduler, epoch=2).epoch == 2


def test_a_new_welcome_starts_anew(scheduler: ScriptedScheduler, fake: FakeExecutor) -> None:
    attach(scheduler, fake)
    serve_one(scheduler, epoch=1)
    scheduler.known_epochs.add(5)
    scheduler.router.send_multipart([scheduler.peer, encode(Welcome(5, 50))])
    fake.wait_attached(2)
    assert serve_one(scheduler, epoch=5).epoch == 5


def test_a_repeated_welcome_changes_nothing(scheduler: ScriptedScheduler, fake: FakeExecutor) -> None:
    attach(scheduler, fake)
    serve_one(scheduler, epoch=1)
    scheduler.send(Welcome(1, 50), decode_plan(2, 0))
    assert scheduler.receive(Result).iteration == 2


JUNK = [
    (b"",),
    (b"\x45",),
    (b"\x93\x0c\x01",),
    (encode(decode_plan(1, 0))[:-2],),
    (b"\xdd\xff\xff\xff\xff",),
    (b"\xc6\xff\xff\xff\xff",),
    (b"\x91\x63",),
    (b"\x81\x01\x02",),
    (encode(Alive(1)), encode(Alive(1))),
    (encode(decode_plan(1, 0)), b"more"),
    (encode(Leaving(1, "not for an executor")),),
    (b"[" * 100_000,),
]


@pytest.mark.parametrize("frames", JUNK, ids=range(len(JUNK)))
def test_junk_is_counted_and_dropped(
    scheduler: ScriptedScheduler, fake: FakeExecutor, frames: tuple[bytes, ...]
) -> None:
    attach(scheduler, fake)
    serve_one(scheduler, epoch=1)
    scheduler.send_raw(*frames)
    scheduler.send(decode_plan(2, 0))
    assert scheduler.receive(Result).iteration == 2
    assert sum(fake.link.junk.values()) == 1


def test_a_frame_over_the_limit_cuts_the_connection_not_the_process() -> None:
    """A header that announces a huge frame: nothing is allocated, and the executor dials again."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with FakeExecutor(f"tcp://127.0.0.1:{port}") as fake:
            server.settimeout(10)
            connection, _ = server.accept()
            with connection:
                connection.settimeout(10)
                greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x01" + bytes(31)
                connection.sendall(greeting)
                ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06ROUTER"
                connection.sendall(b"\x04" + bytes([len(ready)]) + ready)
                connection.sendall(b"\x02" + struct.pack(">Q", 1 << 40) + b"x" * 1000)
                while connection.recv(65536):
                    pass
            again, _ = server.accept()
            again.close()
            assert fake.is_running


def test_alive_goes_on_while_it_computes(scheduler: ScriptedScheduler, fake: FakeExecutor) -> None:
    attach(scheduler, fake)
    fake.hold()
    scheduler.send(prefill_plan(1, new_sequence(0, [1, 2], [0])))
    fake.wait_plans(1)
    before = scheduler.num_alive
    scheduler.beat(lambda: scheduler.num_alive >= before + 30)
    fake.release()
    assert scheduler.receive(Result).iteration == 1


def test_an_unknown_epoch_is_a_reset(scheduler: ScriptedScheduler, fake: FakeExecutor) -> None:
    attach(scheduler, fake)
    serve_one(scheduler, epoch=1)
    scheduler.known_epochs.clear()
    attach(scheduler, fake, epoch=2)
    assert not fake.runner.state.columns.live.any()


def test_a_silent_scheduler_is_lost_and_dialled_anew(scheduler: ScriptedScheduler, fake: FakeExecutor) -> None:
    attach(scheduler, fake)
    first_peer = scheduler.peer
    serve_one(scheduler, epoch=1)
    scheduler.echoes = False
    scheduler.receive(Hello)
    assert scheduler.peer != first_peer
    scheduler.echoes = True
    attach(scheduler, fake, epoch=2)
    assert serve_one(scheduler, epoch=2).epoch == 2


def test_a_result_of_a_lost_epoch_is_not_sent(scheduler: ScriptedScheduler, fake: FakeExecutor) -> None:
    attach(scheduler, fake)
    fake.hold()
    scheduler.send(prefill_plan(1, new_sequence(0, [1, 2], [0])))
    fake.wait_plans(1)
    scheduler.known_epochs.clear()
    heartbeat = fake.link._heartbeat
    assert heartbeat is not None
    scheduler.beat(lambda: not heartbeat._thread.is_alive())
    fake.release()
    scheduler.receive(Hello)  # the next message, not a Result


def test_a_restarted_scheduler_is_found_again(scheduler: ScriptedScheduler, fake: FakeExecutor) -> None:
    attach(scheduler, fake)
    serve_one(scheduler, epoch=1)
    scheduler.router.close()
    second = ScriptedScheduler(scheduler.port)
    attach(second, fake, epoch=1_000)
    assert serve_one(second, epoch=1_000).epoch == 1_000
    second.close()


def test_drain_ends_it(scheduler: ScriptedScheduler, fake: FakeExecutor) -> None:
    attach(scheduler, fake)
    scheduler.send(Drain(1))
    fake.join()
    assert fake.error is None


def test_a_stop_lets_the_scheduler_move_the_sequences_first(scheduler: ScriptedScheduler, fake: FakeExecutor) -> None:
    attach(scheduler, fake)
    fake.hold()
    scheduler.send(prefill_plan(1, new_sequence(0, [1, 2], [0])))
    fake.wait_plans(1)
    fake.link.request_stop("SIGTERM")
    fake.release()
    assert scheduler.receive(Result).iteration == 1
    leaving = scheduler.receive(Leaving)
    assert (leaving.epoch, leaving.reason) == (1, "SIGTERM")
    scheduler.send(decode_plan(2, 0))
    assert scheduler.receive(Result).iteration == 2
    scheduler.send(Drain(1))
    fake.join()
    assert fake.error is None


def test_a_stop_ends_when_the_grace_is_over(scheduler: ScriptedScheduler) -> None:
    with FakeExecutor(scheduler.address, grace_s=0.1) as fake:
        attach(scheduler, fake)
        fake.link.request_stop("SIGTERM")
        scheduler.receive(Leaving)
        fake.join()
        assert fake.error is None


def test_a_stop_before_the_attachment_ends_at_once(scheduler: ScriptedScheduler, fake: FakeExecutor) -> None:
    scheduler.receive(Hello)
    fake.stop()
    assert fake.error is None


def test_a_reset_while_leaving_ends_it(scheduler: ScriptedScheduler, fake: FakeExecutor) -> None:
    attach(scheduler, fake)
    fake.link.request_stop("SIGTERM")
    scheduler.receive(Leaving)
    scheduler.send(Reset(1, "the scheduler stops"))
    fake.join()
    assert fake.error is None


def test_an_answer_that_does_not_fit_the_wire_is_a_fault(scheduler: ScriptedScheduler) -> None:
    script = Script(choose=lambda _tokens, _length, _params: 1, chosen_logprob=0.0)
    with FakeExecutor(scheduler.address, script) as fake:
        attach(scheduler, fake)
        run = fake.runner.run

        def broken(plan: Plan) -> Result | Fault:
            result = run(plan)
            assert isinstance(result, Result)
            object.__setattr__(result, "busy_us", "soon")
            return result

        fake.runner.run = broken  # type: ignore[method-assign]
        scheduler.send(prefill_plan(1, new_sequence(0, [1, 2], [0])))
        assert scheduler.receive(Fault).reason == "wire"


@pytest.mark.parametrize("action", [Action.DIE_BEFORE, Action.DIE_AFTER])
def test_a_scripted_death_sends_nothing(scheduler: ScriptedScheduler, action: Action) -> None:
    with FakeExecutor(scheduler.address, Script(actions={2: action})) as fake:
        attach(scheduler, fake)
        serve_one(scheduler, epoch=1)
        scheduler.send(decode_plan(2, 0))
        fake.join()
        assert fake.error is None
        with pytest.raises(TimeoutError):
            scheduler.receive_any(0.1)
