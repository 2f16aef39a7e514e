"""The admin API over a membership without sockets: what is told, what is done, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest

from common.wire import (
    Command,
    Drain,
    Leaving,
    Message,
    Outcome,
    Roster,
    Survey,
    decode,
    encode,
)
from scheduler_svc.admin.app import create_app
from scheduler_svc.admin.key import AdminKey
from scheduler_svc.admin.roster import roster
from scheduler_svc.admin.steering import obey
from scheduler_svc.pauses import MAX_PAUSES, Pauses
from scheduler_svc.stats import gather
from tests.scheduler.test_membership import Rig, hello, result


class DirectLink:
    """Asks the core without a socket, at the rig's time; the messages go through the codec."""

    def __init__(self, rig: AdminRig) -> None:
        self._rig = rig

    async def ask(self, question: Callable[[int], Message]) -> Message:
        rig, asked = self._rig, decode(encode(question(7)))
        assert isinstance(asked, Command | Survey)
        if isinstance(asked, Survey):
            answer: Message = roster(asked.number, rig.scheduler, rig.membership, rig.now)
        else:
            answer = obey(asked, rig.scheduler, rig.membership, rig.now)
        rig.membership.plan_idle_lanes(rig.now)
        assert isinstance(answer, Roster | Outcome) and answer.number == 7
        return decode(encode(answer))


class AdminRig(Rig):
    """A rig with the admin API before it."""

    def __init__(self, key: str = "") -> None:
        super().__init__()
        self.now = 0.0
        self.app = create_app("ipc:///nowhere", AdminKey(key) if key else None)
        self.app.state.link = DirectLink(self)

    def ask(self, method: str, path: str, host: str = "127.0.0.1:8001", **fields: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}") as client:
                return await client.request(method, f"/admin/{path}", **fields)

        return asyncio.run(send())

    def state(self, name: str = "one") -> str:
        return str(self.ask("GET", f"executors/{name}").json()["state"])

    def two(self) -> tuple[int, int]:
        """Epochs of two executors of one model."""
        return self.attach(b"p"), self.attach(b"q", name="two", incarnation=b"j")


@pytest.fixture
def rig() -> AdminRig:
    return AdminRig()


def error(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    found = response.json()["error"]
    assert set(found) == {"message", "type", "param", "code"} and found["message"]
    return dict(found)


# --- what is told ---


def test_what_is_told_of_an_executor(rig: AdminRig) -> None:
    epoch = rig.attach()
    rig.submit()
    rig.receive(b"p", result(rig.plan(0.0), 7), now=0.5)
    rig.plan(1.0)
    rig.now = 1.25
    (told,) = rig.ask("GET", "executors").json()["data"]
    assert told == rig.ask("GET", "executors/one").json()
    expected = {
        "name": "one", "object": "executor", "epoch": epoch, "model": "m", "fingerprint": b"w".hex(), "device": "cpu",
        "state": "attached", "spare": False, "seats": 8, "running": 1, "kv_blocks": 64, "kv_blocks_used": 2,
        "iterations": 2, "attached_s": 1.25, "silent_s": 1.25, "last_failure": None,
        "iteration_s": {"mean": 0.5, "slowest": 0.5, "deadline": 3.0, "in_flight": 0.25},
    }  # fmt: skip
    assert told == expected


def test_who_was_lost_is_told_with_the_reason(rig: AdminRig) -> None:
    rig.two()
    rig.membership.receive(b"p", b"\xc1", 0.0)
    rig.now = 2.0
    answer = rig.ask("GET", "executors").json()
    assert [told["name"] for told in answer["data"]] == ["two"]
    (lost,) = answer["lost"]
    assert lost["name"] == "one" and "junk" in lost["reason"] and lost["ago_s"] == 2.0
    rig.attach(b"r", incarnation=b"k")
    answer = rig.ask("GET", "executors").json()
    failures = {told["name"]: told["last_failure"] for told in answer["data"]}
    assert failures["two"] is None and "junk" in failures["one"]["reason"] and answer["lost"] == []


def test_what_is_told_of_models(rig: AdminRig) -> None:
    rig.two()
    rig.submit()
    rig.plan()
    assert rig.ask("GET", "models").json()["data"] == [
        {"id": "m", "object": "model", "offered": True, "executors": ["one", "two"], "waiting": 0, "running": 1,
         "kv_tokens": 256}
    ]  # fmt: skip
    for name in (b"p", b"q"):
        rig.membership.receive(name, b"\xc1", 0.0)
    rig.now = 6.0
    (told,) = rig.ask("GET", "models").json()["data"]
    assert (told["offered"], told["executors"], told["waiting"]) == (False, [], 1)


def test_no_more_losses_are_kept_than_fit_a_message(rig: AdminRig) -> None:
    for i in range(300):
        rig.attach(b"%d" % i, name=f"e{i}", incarnation=b"%d" % i)
        rig.membership.receive(b"%d" % i, b"\xc1", 0.0)
    lost = rig.ask("GET", "executors").json()["lost"]
    assert len(lost) == 256 and lost[-1]["name"] == "e299"


# --- what is done ---


def test_drain_pause_resume(rig: AdminRig) -> None:
    rig.two()
    streams = [rig.submit(), rig.submit()]
    rig.membership.plan_idle_lanes(0.0)
    plan = next(m for p, m in rig.sent if p == b"p" and hasattr(m, "decodes"))
    answer = rig.ask("POST", "executors/one/drain")
    assert answer.status_code == 202
    assert answer.json() == {"object": "list", "data": [{"name": "one", "state": "draining", "running": 1}]}
    assert rig.ask("POST", "executors/one/drain").status_code == 202, "once more is no mistake"
    rig.receive(b"p", result(plan, 7))  # type: ignore[arg-type]
    rig.membership.plan_idle_lanes(0.0)
    assert rig.state() == "paused" and len(rig.scheduler.lanes) == 2
    assert not any(isinstance(message, Drain) for _, message in rig.sent)
    running = {told["name"]: told["running"] for told in rig.ask("GET", "executors").json()["data"]}
    assert running == {"one": 0, "two": 1}, "the other one is in an iteration, and takes the second at its next"
    assert rig.ask("POST", "executors/one/resume").status_code == 202
    assert rig.state() == "attached"
    assert rig.ended() == [] and rig.streamed(streams[0]) + rig.streamed(streams[1]) == [7]


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [("DELETE", "executors/one", None), ("POST", "executors/one/drain", {"release": True})],
)
def test_release_lets_an_idle_executor_go_at_once(rig: AdminRig, method: str, path: str, body: Any) -> None:
    epoch, _ = rig.two()
    rig.ask("POST", "executors/one/drain")
    assert rig.state() == "paused"
    assert rig.ask(method, path, json=body).status_code == 202
    assert rig.last(Drain, b"p") == Drain(epoch)
    assert [told["name"] for told in rig.ask("GET", "executors").json()["data"]] == ["two"]


def test_a_paused_executor_that_wants_to_leave_is_let_go(rig: AdminRig) -> None:
    epoch, _ = rig.two()
    rig.ask("POST", "executors/one/drain")
    rig.receive(b"p", Leaving(epoch, "SIGTERM"))
    rig.membership.plan_idle_lanes(0.0)
    assert rig.last(Drain, b"p") == Drain(epoch)


def test_a_drain_that_takes_too_long_gives_back_what_is_left(rig: AdminRig) -> None:
    rig.attach()
    stream = rig.submit()
    plan = rig.plan()
    assert rig.ask("POST", "executors/one/drain", json={"timeout_s": 0.5}).status_code == 202
    assert rig.membership.check(0.25) == pytest.approx(0.25)
    rig.membership.check(0.5)
    rig.receive(b"p", result(plan, 7), now=0.6)
    rig.membership.plan_idle_lanes(0.6)
    assert rig.state() == "paused" and rig.streamed(stream) == [7] and rig.ended() == []
    rig.now = 0.7
    rig.ask("POST", "executors/one/resume")
    assert rig.plan(0.7).new[0].tokens.tolist() == [0, 1, 2, 3, 4, 5, 7]


def test_a_resumed_executor_is_not_emptied_by_a_time_that_was_set_before(rig: AdminRig) -> None:
    rig.attach()
    rig.submit()
    rig.plan()
    rig.ask("POST", "executors/one/drain", json={"timeout_s": 0.5})
    rig.ask("POST", "executors/one/resume")
    rig.membership.check(0.9)
    assert not next(iter(rig.scheduler.lanes.values())).must_empty


def test_all_executors_of_a_model_are_paused_and_resumed(rig: AdminRig) -> None:
    rig.two()
    states = rig.ask("POST", "models/m/pause").json()["data"]
    assert {told["name"]: told["state"] for told in states} == {"one": "paused", "two": "paused"}
    assert not gather(rig.scheduler, rig.membership, stopping=False).ready
    stream = rig.submit()
    rig.ask("POST", "executors/two/resume")
    rig.receive(b"q", result(rig.plan(), 7))
    assert rig.streamed(stream) == [7]
    assert rig.ask("POST", "models/m/resume").status_code == 202
    assert rig.state("one") == rig.state("two") == "attached"
    assert error(rig.ask("POST", "models/m/resume"), 409)["code"] == "wrong_state"


@pytest.mark.parametrize("incarnation", [b"i", b"new"], ids=["its connection", "its process"])
def test_a_pause_outlives_what_it_was_attached_by(rig: AdminRig, incarnation: bytes) -> None:
    rig.two()
    rig.ask("POST", "executors/one/drain")
    rig.membership.lose(rig.membership.executors[0], 0.0, "connection lost")
    rig.attach(b"r", incarnation=incarnation)
    stream = rig.submit()
    rig.membership.plan_idle_lanes(0.0)
    assert (rig.state("one"), rig.state("two")) == ("paused", "attached")
    running = {told["name"]: told["running"] for told in rig.ask("GET", "executors").json()["data"]}
    assert running == {"one": 0, "two": 1} and rig.streamed(stream) == []
    assert rig.ask("POST", "executors/one/resume").status_code == 202 and rig.state("one") == "attached"
    rig.receive(b"r2", hello(incarnation=incarnation))
    assert rig.state("one") == "attached", "nor does a pause outlive its end"


@pytest.mark.parametrize(
    ("method", "path"),
    [("DELETE", "executors/one"), ("POST", "executors/one/resume"), ("POST", "models/m/resume")],
)
def test_the_pause_of_one_that_is_away_can_be_ended(rig: AdminRig, method: str, path: str) -> None:
    rig.attach()
    rig.ask("POST", "models/m/pause")
    rig.membership.lose(rig.membership.executors[0], 0.0, "connection lost")
    assert rig.ask(method, path).status_code == 202
    error(rig.ask(method, path), 404)
    rig.attach(b"r")
    assert rig.state() == "attached"


def test_ending_the_pause_of_one_that_is_away_is_no_conflict_for_another_that_is_open(rig: AdminRig) -> None:
    rig.two()
    rig.ask("POST", "executors/one/drain")
    rig.membership.lose(rig.membership.executors[0], 0.0, "connection lost")
    assert rig.ask("GET", "executors").json()["paused"] == ["one"]
    assert rig.ask("POST", "models/m/resume").status_code == 202
    assert rig.ask("GET", "executors").json()["paused"] == []
    assert error(rig.ask("POST", "models/m/resume"), 409)["code"] == "wrong_state"
    rig.attach(b"r")
    assert rig.state("one") == rig.state("two") == "attached"


def test_pauses_are_bounded() -> None:
    pauses = Pauses()
    for i in range(MAX_PAUSES + 1):
        pauses.add(f"gpu-{i}", "m")
    assert len(pauses) == MAX_PAUSES and "gpu-0" not in pauses and "gpu-1" in pauses


def test_the_frontends_are_told_when_what_is_served_changes(rig: AdminRig) -> None:
    rig.attach()
    for path in ("executors/one/drain", "executors/one/resume"):
        rig.membership.models_changed = False
        rig.ask("POST", path)
        assert rig.membership.models_changed


def test_a_spare_shows_and_takes_over(rig: AdminRig) -> None:
    rig.attach()
    rig.receive(b"q", replace(hello("two", incarnation=b"j"), spare=True))
    assert (rig.state("one"), rig.state("two")) == ("attached", "spare")
    series = gather(rig.scheduler, rig.membership, stopping=False).gauges
    assert series['gilir_executor_state{model_name="m",engine="two",state="spare"}'] == 1
    assert [series[f'gilir_seats{{model_name="m",engine="{name}"}}'] for name in ("one", "two")] == [8, 0]
    assert error(rig.ask("POST", "executors/two/resume"), 409)["code"] == "wrong_state"
    stream = rig.submit()
    rig.ask("POST", "executors/one/drain")
    assert (rig.state("one"), rig.state("two")) == ("paused", "attached")
    rig.receive(b"q", result(rig.plan(), 7))
    assert rig.streamed(stream) == [7]
    rig.ask("POST", "executors/one/resume")
    assert rig.state("two") == "spare"


# --- what is refused ---


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "executors/none"),
        ("POST", "executors/none/drain"),
        ("POST", "executors/none/resume"),
        ("DELETE", "executors/none"),
        ("DELETE", "executors/" + "x" * 300),
        ("POST", "models/none/pause"),
        ("POST", "models/none/resume"),
        ("GET", "nothing"),
        ("POST", "executors/%FF%00/drain"),
    ],
)
def test_unknown_names_are_not_found(rig: AdminRig, method: str, path: str) -> None:
    rig.attach()
    assert error(rig.ask(method, path), 404)["code"] == "not_found"


def test_names_may_have_any_characters(rig: AdminRig) -> None:
    rig.attach(name="rack 1/gpu:0 é")
    assert rig.ask("POST", "executors/rack%201%2Fgpu%3A0%20%C3%A9/drain").status_code == 202
    assert rig.state("rack%201/gpu:0%20é") == "paused"


def test_the_wrong_state_is_a_conflict(rig: AdminRig) -> None:
    rig.attach()
    assert "attached" in error(rig.ask("POST", "executors/one/resume"), 409)["message"]
    rig.submit()
    rig.plan()
    assert rig.ask("DELETE", "executors/one").status_code == 202
    assert rig.state() == "leaving"
    for path in ("executors/one/drain", "executors/one/resume"):
        assert "leaving" in error(rig.ask("POST", path), 409)["message"]
    assert rig.ask("DELETE", "executors/one").status_code == 202


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"timeout_s": 0}', "timeout_s"),
        (b'{"timeout_s": -1}', "timeout_s"),
        (b'{"timeout_s": "5"}', "timeout_s"),
        (b'{"timeout_s": NaN}', "timeout_s"),
        (b'{"timeout_s": 1e9}', "timeout_s"),
        (b'{"release": 1}', "release"),
        (b'{"realease": true}', "realease"),
        (b"[]", None),
        (b"{", None),
    ],
)
def test_a_body_that_is_wrong_drains_nothing(rig: AdminRig, body: bytes, param: str | None) -> None:
    rig.attach()
    assert error(rig.ask("POST", "executors/one/drain", content=body), 400)["param"] == param
    assert rig.state() == "attached"


def test_bodies_are_bounded(rig: AdminRig) -> None:
    rig.attach()
    error(rig.ask("POST", "executors/one/drain", content=b" " * 5000), 413)
    assert error(rig.ask("PUT", "executors/one"), 405)["code"] == "method_not_allowed"
