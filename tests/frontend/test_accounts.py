"""Clients ask where their request stands, and learn why it waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from fake_core import Answer, sequence_account
from frontend_service import BYTE_LEVEL, Service, error_of

from common.wire import Account, EndReason, Inquiry
from scheduler_svc.frontend.inquiries import Inquiries
from scheduler_svc.http.errors import ApiError
from scheduler_svc.http.questions import MAX_PENDING


def test_an_account_is_told_whole(service: Service) -> None:
    sequences = (
        sequence_account(),
        sequence_account(
            index=1,
            state="running",
            reason="none",
            executor="gpu-0",
            age_s=2.0,
            waited_s={},
            priority=-1,
            computed_tokens=9,
            generated_tokens=3,
            cached_tokens=4,
            num_preemptions=2,
        ),
    )
    service.core.accounts["abc"] = Account(0, "a model", 5, sequences)
    answer = service.get("/v1/requests/abc")
    assert answer.status_code == 200 and answer.headers["content-type"] == "application/json"
    assert answer.json() == {
        "id": "abc",
        "object": "request",
        "model": "a model",
        "state": "running",
        "num_waiting": 5,
        "sequences": [
            {
                "index": 0,
                "state": "waiting",
                "reason": "seats",
                "executor": None,
                "age_s": 1.5,
                "waited_s": {"seats": 1.25, "kv_blocks": 0.25},
                "priority": 0,
                "prompt_tokens": 7,
                "computed_tokens": 0,
                "generated_tokens": 0,
                "cached_tokens": 0,
                "num_preemptions": 0,
            },
            {
                "index": 1,
                "state": "running",
                "reason": "none",
                "executor": "gpu-0",
                "age_s": 2.0,
                "waited_s": {},
                "priority": -1,
                "prompt_tokens": 7,
                "computed_tokens": 9,
                "generated_tokens": 3,
                "cached_tokens": 4,
                "num_preemptions": 2,
            },
        ],
    }


def test_a_request_that_only_waits_is_waiting(service: Service) -> None:
    service.core.accounts["abc"] = Account(0, "m", 1, (sequence_account(), sequence_account(index=1)))
    assert service.get("/v1/requests/abc").json()["state"] == "waiting"


@pytest.mark.parametrize("asked", ["abc", "cmpl-abc", "chatcmpl-abc", "resp_abc"])
def test_an_answers_id_is_an_id(service: Service, asked: str) -> None:
    service.core.accounts["abc"] = Account(0, "m", 1, (sequence_account(),))
    assert service.get(f"/v1/requests/{asked}").json()["id"] == asked


def test_a_clients_own_id_may_look_like_an_answers(service: Service) -> None:
    for own in ("cmpl-abc", "a/b?c=%d", "x" * 200):
        service.core.accounts[own] = Account(0, "m", 1, (sequence_account(),))
        assert service.get(f"/v1/requests/{quote(own, safe='')}").json()["id"] == own
        assert service.get(f"/v1/requests/{quote('cmpl-' + own, safe='')}").status_code == 200


@pytest.mark.parametrize("asked", ["", "nobody", "cmpl-nobody", "cmpl-", "x" * 300, "with%20space", "%C3%A9", "%00"])
def test_what_is_not_live_is_not_found(service: Service, asked: str) -> None:
    error = error_of(service.get(f"/v1/requests/{asked}"), 404)
    assert (error["type"], error["code"]) == ("invalid_request_error", "request_not_found")
    assert len(error["message"]) < 200


def test_other_methods_are_not_allowed(service: Service) -> None:
    assert error_of(service.post("/v1/requests/abc"), 405)["code"] == "method_not_allowed"


def test_a_core_that_does_not_answer_is_503(service: Service) -> None:
    service.core.mute = True
    error = error_of(service.get("/v1/requests/abc"), 503)
    assert (error["type"], error["code"]) == ("service_unavailable", "no_scheduler")
    service.core.mute = False
    error_of(service.get("/v1/requests/abc"), 404)


@contextmanager
def waiting_request(service: Service, **headers: str) -> Iterator[list[httpx.Response]]:
    """A streamed request whose first token has not come; its answer is in the list when it has been let go."""
    gate, found = threading.Semaphore(0), []
    service.core.answer(Answer([*service.ids(" one"), service.eos()], gate=gate))
    body: dict[str, Any] = {"model": BYTE_LEVEL, "prompt": "Hello", "stream": True}

    def ask() -> None:
        found.append(httpx.post(service.url + "/v1/completions", json=body, headers=headers, timeout=60))

    asker = threading.Thread(target=ask)
    asker.start()
    try:
        assert service.core.wait_for(lambda: bool(service.core.requests))
        yield found
    finally:
        for _ in range(20):
            gate.release()
        asker.join(60)


def test_a_stream_that_waits_is_found_under_the_id_that_its_client_chose(service: Service) -> None:
    """Its head comes with its first token, so that early errors have a status: until then only this id is known."""
    with waiting_request(service, **{"X-Request-Id": "mine-1"}) as answers:
        request = service.core.requests[0]
        assert request.request_id == "mine-1"
        service.core.accounts[request.request_id] = Account(0, request.model, 1, (sequence_account(),))
        assert service.get("/v1/requests/mine-1").json()["sequences"][0]["reason"] == "seats"
        assert not answers
    assert answers[0].status_code == 200 and answers[0].headers["x-request-id"] == "mine-1"
    assert '"id":"cmpl-mine-1"' in answers[0].text


@pytest.mark.parametrize(
    ("reason", "status"), [(EndReason.QUEUE_FULL, 429), (EndReason.NO_EXECUTOR, 503), (EndReason.REJECTED, 400)]
)
def test_a_stream_that_is_refused_has_its_status_and_its_id(service: Service, reason: EndReason, status: int) -> None:
    service.core.answer(Answer((), reason))
    body = {"model": BYTE_LEVEL, "prompt": "Hello", "stream": True}
    answer = service.client.post("/v1/completions", json=body, headers={"X-Request-Id": "mine-2"})
    error_of(answer, status)
    assert answer.headers["x-request-id"] == "mine-2"


# --- from within ---


def ask_all(count: int, send: Any) -> tuple[Inquiries, list[Any]]:
    """Ask `count` questions at a time. Returns what came of each."""

    async def main() -> tuple[Inquiries, list[Any]]:
        inquiries = Inquiries(lambda inquiry: send(inquiries, inquiry))
        asked = [inquiries.ask(f"id-{i}") for i in range(count)]
        return inquiries, await asyncio.gather(*asked, return_exceptions=True)

    return asyncio.run(main())


def test_answers_find_their_questions_in_any_order() -> None:
    sent: list[Inquiry] = []

    def send(inquiries: Inquiries, inquiry: Inquiry) -> bool:
        sent.append(inquiry)
        if len(sent) == 5:
            for asked in reversed(sent):
                account = Account(asked.number, asked.request_id, 0, ())
                inquiries.take(account)
                inquiries.take(account)
            inquiries.take(Account(12345, "unasked", 0, ()))
        return True

    inquiries, answers = ask_all(5, send)
    assert [answer.model for answer in answers] == [f"id-{i}" for i in range(5)]
    assert len(inquiries) == 0


def test_questions_are_bounded_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler_svc.http.questions.TIMEOUT_S", 0.01)
    num_sent = 0

    def send(_inquiries: Inquiries, _inquiry: Inquiry) -> bool:
        nonlocal num_sent
        num_sent += 1
        return True

    inquiries, answers = ask_all(MAX_PENDING + 3, send)
    assert all(isinstance(answer, ApiError) and answer.status == 503 for answer in answers)
    assert [answer.code for answer in answers].count("busy") == 3 and num_sent == MAX_PENDING
    assert len(inquiries) == 0


def test_a_link_that_is_full_asks_nothing() -> None:
    inquiries, (answer,) = ask_all(1, lambda _inquiries, _inquiry: False)
    assert isinstance(answer, ApiError) and answer.status == 503 and len(inquiries) == 0
