"""A client asks where its request stands, and is told what it waits for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

FIRST = [100 + i for i in range(100)]
SECOND = [300 + i for i in range(100)]


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Threads for the requests of a test, which must be able to end when it is over."""
    with ThreadPoolExecutor(4) as pool:
        yield pool


def ask(stack: Any, request_id: str) -> dict[str, Any] | None:
    """The account of a live request."""
    answer = stack.client.get(f"/v1/requests/{request_id}")
    if answer.status_code == 404:
        assert answer.json()["error"]["code"] == "request_not_found"
        return None
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def until_told(stack: Any, request_id: str, **expected: Any) -> dict[str, Any]:
    """Ask until the first sequence's account says so."""
    told: dict[str, Any] = {}

    def as_expected() -> bool:
        nonlocal told
        told = ask(stack, request_id) or {}
        return bool(told) and expected.items() <= told["sequences"][0].items()

    stack.until(as_expected, f"{request_id} to be told as {expected}")
    return told


def assert_waited_all_its_life(sequence: dict[str, Any], reason: str) -> None:
    """Its waiting adds up to its age, nearly all of it for this reason."""
    assert sum(sequence["waited_s"].values()) == pytest.approx(sequence["age_s"], abs=0.1)
    assert max(sequence["waited_s"], key=sequence["waited_s"].__getitem__) == reason


def finish(stack: Any, fake: Any, *requests: Any) -> None:
    """Let the executor go on: every request ends well, and is told of no more."""
    fake.release()
    for request in requests:
        assert request.result(60).status_code == 200, request.result().text
    stack.until_idle()
    assert ask(stack, "first") is None and ask(stack, "second") is None


def test_for_a_seat(start: Callable[..., Any], pool: ThreadPoolExecutor) -> None:
    stack = start("--max-num-seqs", "1")
    fake = stack.fake("gpu")
    stack.ready()
    fake.hold()
    first = pool.submit(stack.complete, FIRST, 5, request_id="first", priority=-2)
    until_told(stack, "first", state="running", executor="gpu", priority=-2, prompt_tokens=100, generated_tokens=0)
    second = pool.submit(stack.complete, SECOND[:70], 5, request_id="second")
    until_told(stack, "second", state="waiting")
    # What it waits for is seen when the next iteration is planned.
    fake.release(1)
    told = until_told(stack, "second", state="waiting", reason="seats", executor=None, prompt_tokens=70)
    assert (told["state"], told["num_waiting"], told["model"]) == ("waiting", 1, "model")
    stack.until(lambda: ask(stack, "second")["sequences"][0]["waited_s"].get("seats", 0) > 0.3, "some waiting")
    assert_waited_all_its_life(ask(stack, "second")["sequences"][0], "seats")
    finish(stack, fake, first, second)
    assert stack.metric("gilir_waiting_seconds_total") > 0.3


def test_each_sequence_of_a_request_has_its_own_account(start: Callable[..., Any], pool: ThreadPoolExecutor) -> None:
    stack = start("--max-num-seqs", "1")
    fake = stack.fake()
    stack.ready()
    fake.hold()
    first = pool.submit(stack.complete, FIRST, 5, request_id="first", n=3)
    stack.until(lambda: len((ask(stack, "cmpl-first") or {"sequences": ()})["sequences"]) == 3, "all three")
    told = ask(stack, "first")
    assert told is not None and (told["state"], told["num_waiting"]) == ("running", 2)
    states = {sequence["index"]: sequence["state"] for sequence in told["sequences"]}
    assert states == {0: "running", 1: "waiting", 2: "waiting"}
    finish(stack, fake, first)


def test_for_blocks(start: Callable[..., Any], pool: ThreadPoolExecutor) -> None:
    """The pool holds 128 tokens: one of the two at a time."""
    stack = start()
    fake = stack.fake(num_blocks=8)
    stack.ready()
    fake.hold()
    first = pool.submit(stack.complete, FIRST, 20, request_id="first")
    until_told(stack, "first", state="running")
    second = pool.submit(stack.complete, SECOND, 20, request_id="second")
    until_told(stack, "second", state="waiting")
    fake.release(1)
    told = until_told(stack, "second", state="waiting", reason="kv_blocks")
    assert told["num_waiting"] == 1
    until_told(stack, "first", generated_tokens=1, computed_tokens=100)
    finish(stack, fake, first, second)


def test_for_an_executor(start: Callable[..., Any], pool: ThreadPoolExecutor) -> None:
    stack = start()
    fake = stack.fake("one")
    stack.ready()
    fake.hold()
    first = pool.submit(stack.complete, FIRST, 9, request_id="first")
    until_told(stack, "first", state="running", executor="one")
    fake.release(3)
    until_told(stack, "first", generated_tokens=3)
    fake.kill()
    told = until_told(stack, "first", state="waiting", reason="no_executor", executor=None)
    assert (told["sequences"][0]["generated_tokens"], told["sequences"][0]["computed_tokens"]) == (3, 0)
    second = pool.submit(stack.complete, SECOND, 9, request_id="second")
    told = until_told(stack, "second", state="waiting", reason="no_executor")
    assert told["num_waiting"] == 2
    stack.until(lambda: ask(stack, "second")["sequences"][0]["age_s"] > 0.3, "some waiting")
    assert_waited_all_its_life(ask(stack, "second")["sequences"][0], "no_executor")
    other = stack.fake("two")
    finish(stack, other, first, second)


def test_at_any_frontend(start: Callable[..., Any], pool: ThreadPoolExecutor) -> None:
    """Connections go to the frontends as the system likes; each of them asks the core."""
    stack = start("--frontends", "2")
    fake = stack.fake()
    stack.ready()
    fake.hold()
    first = pool.submit(stack.complete, FIRST, 5, request_id="first")
    until_told(stack, "first", state="running")
    for _ in range(16):
        answer = httpx.get(f"{stack.url}/v1/requests/first", timeout=60)
        assert answer.status_code == 200 and answer.json()["sequences"][0]["state"] == "running"
    finish(stack, fake, first)
