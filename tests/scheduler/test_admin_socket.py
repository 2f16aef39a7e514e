"""The sockets between the admin process and the core: answers, junk, silence, life."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import zmq

from common.wire import (
    Action,
    AdminAlive,
    Command,
    Leaving,
    Outcome,
    Roster,
    Survey,
    decode,
    encode,
)
from scheduler_svc.admin.desk import AdminDesk
from scheduler_svc.admin.link import AdminLink
from scheduler_svc.http.errors import ApiError
from tests.scheduler.test_admin import AdminRig


def test_the_desk_answers_and_drops_junk() -> None:
    rig = AdminRig()
    rig.attach()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router, context.socket(zmq.DEALER) as dealer:
        router.bind("inproc://admin")
        dealer.connect("inproc://admin")
        heard: list[float] = []
        desk = AdminDesk(router, rig.scheduler, rig.membership, heard.append)
        for junk in (b"", b"\xc1", b"\x92\x28", encode(Leaving(1, "x")), encode(Outcome(1, 1))):
            dealer.send(junk)
        dealer.send_multipart([encode(Survey(1)), b""])
        dealer.send(encode(Survey(5)))
        dealer.send(encode(Command(6, Action.DRAIN, False, "one")))
        dealer.send(encode(AdminAlive(0)))
        desk.serve(0.0)
        assert heard == [0.0]
        first, second = decode(dealer.recv()), decode(dealer.recv())
        assert isinstance(first, Roster) and first.number == 5 and first.executors[0].state == "attached"
        assert second == Outcome(6, 1, "")
        assert not dealer.poll(0)


def test_a_core_that_does_not_answer_is_503(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("scheduler_svc.http.questions.TIMEOUT_S", 0.05)

    async def ask() -> None:
        link = AdminLink(f"ipc://{tmp_path}/nobody")
        link.open()
        try:
            with pytest.raises(ApiError, match="does not answer"):
                await link.ask(Survey)
        finally:
            await link.close()

    asyncio.run(ask())


def test_the_admin_process_shows_life(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("scheduler_svc.admin.link.ALIVE_S", 0.01)

    async def listen(router: zmq.Socket[bytes]) -> None:
        link = AdminLink(f"ipc://{tmp_path}/core")
        link.open()
        try:
            for _ in range(2):
                while not router.poll(0):
                    await asyncio.sleep(0.005)
                assert isinstance(decode(router.recv_multipart()[1]), AdminAlive)
        finally:
            await link.close()

    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(f"ipc://{tmp_path}/core")
        asyncio.run(asyncio.wait_for(listen(router), 60))
