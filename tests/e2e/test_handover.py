"""An executor leaves: its streams go on elsewhere with the KV that they had, and say what they would have said."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from common.wire import Limits
from executor_svc.fake import FakeExecutor
from executor_svc.fake_model import card_from_folder, readable_tokens
from executor_svc.script import Script
from tests.e2e.conftest import MODEL
from tests.e2e.prompts import TEXTS

BLOCK = 16
SAMPLING: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 7, "top_p": 0.9}, {"repetition_penalty": 1.2}]
"""In turn."""


def joined(events: Iterator[dict[str, Any]]) -> str:
    return "".join(choice["text"] for event in events for choice in event["choices"])


def stream(stack: Any, number: int, max_tokens: int) -> str:
    return joined(stack.stream(TEXTS[number], max_tokens, **SAMPLING[number % len(SAMPLING)]))


def recomputed(records: list[dict[str, Any]]) -> dict[str, int]:
    """By sequence that ran on two executors: prefill tokens on the second."""
    first: dict[str, str] = {}
    found: dict[str, int] = {}
    for record in records:
        for _, name, tokens in record.get("prefills", ()):
            if first.setdefault(name, record["lane"]) != record["lane"]:
                found[name] = found.get(name, 0) + tokens
    return found


def test_streams_of_a_real_executor_go_on_with_their_kv(start: Callable[..., Any]) -> None:
    """What is computed on the target is less than a block a sequence."""
    stack = start("--handover", "always", "--no-prefix-caching")
    leaving, _ = (stack.real(name, "--max-num-seqs", "8") for name in ("leaving", "staying"))
    stack.ready()
    stack.until(lambda: stack.metric("gilir_lanes") == 2, "both executors")
    with ThreadPoolExecutor(len(TEXTS)) as pool:
        undisturbed = list(pool.map(lambda i: stream(stack, i, 200), range(len(TEXTS))))
        assert stack.metric("gilir_handover_blocks_total") == 0
        begun = len(stack.planned_requests())
        answers = [pool.submit(stream, stack, i, 200) for i in range(len(TEXTS))]
        stack.until(lambda: len(stack.planned_requests()) == begun + len(TEXTS), "all to run")
        leaving.popen.send_signal(signal.SIGTERM)
        assert leaving.popen.wait(60) == 0
        assert [answer.result(60) for answer in answers] == undisturbed
    stack.until_idle()
    moved = recomputed(stack.plan_records())
    assert moved and max(moved.values()) < BLOCK
    assert stack.metric("gilir_handovers_total") == len(moved) <= stack.metric("gilir_handover_blocks_total")
    assert stack.metric("gilir_recomputed_tokens_total") == 0


def fake(stack: Any, name: str, **options: Any) -> FakeExecutor:
    card = card_from_folder(MODEL, "model")
    made = FakeExecutor(
        stack.services.executor_address,
        Script(delay_s=0.015, alphabet=readable_tokens(card)),
        name=name,
        model=card,
        limits=Limits(BLOCK, 256, 0, 8, 256),
        **{"transfer_bind": "tcp://127.0.0.1:*", **options},
    ).start()
    stack.fakes.append(made)
    return made


@pytest.mark.parametrize(
    "how",
    [
        "whole",
        pytest.param("the source says nothing", marks=pytest.mark.nightly),
        pytest.param("the source dies", marks=pytest.mark.nightly),
    ],
)
def test_whatever_becomes_of_a_hand_over_the_answers_are_the_same(start: Callable[..., Any], how: str) -> None:
    """A scripted executor's KV is a hash of the history: one wrong block, and the text is another."""
    quickly = () if how == "whole" else ("--heartbeat-timeout-s", "1")
    stack = start("--handover", "always", "--no-prefix-caching", "--heartbeat-ms", "100", *quickly)
    leaving = fake(stack, "leaving")
    stack.ready()
    prompts = [[(7 * i + j * j) % 900 + 5 for j in range(70)] for i in range(4)]
    with ThreadPoolExecutor(4) as pool:
        undisturbed = list(pool.map(lambda prompt: stack.text(prompt, 150), prompts))
        leaving.hold()
        answers = [pool.submit(lambda p: joined(stack.stream(p, 150)), prompt) for prompt in prompts]
        stack.until(lambda: stack.metric("gilir_live_sequences") == 4, "all to be there")
        begun = leaving.runner.num_plans
        leaving.release(20)
        leaving.wait_plans(begun + 20)  # all are in mid-answer, until the other one is there
        taking = fake(stack, "taking")
        stack.until(lambda: stack.metric("gilir_lanes") == 2, "the other executor")
        if how != "whole":
            assert leaving.link.exchange is not None
            leaving.link.exchange._lending.find = lambda _request: None  # type: ignore[method-assign]
        leaving.link.request_stop("going")
        leaving.release()
        if how == "the source dies":
            taking.wait_attached()
            stack.until(lambda: not leaving.is_running or taking.link.exchange._current, "a hand-over to begin")
            leaving.kill()
        assert [answer.result(60) for answer in answers] == undisturbed
    assert taking.runner.pseudo.num_corrupt == 0 and taking.error is None
    stack.until_idle()
    blocks = stack.metric("gilir_handover_blocks_total")
    assert blocks >= 4 * 4 if how == "whole" else blocks == 0
    assert (stack.metric("gilir_recomputed_tokens_total") == 0) == (how == "whole")
