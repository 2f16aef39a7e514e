"""Executors die, hang, fault and are swapped; answers go on with the very same tokens (C01, C03, C28, C29)."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import zmq

from deploy.local import Process
from executor_svc.script import Action, Script

PROMPT = "In the beginning"


def join(events: Iterator[dict[str, Any]]) -> str:
    return "".join(choice["text"] for event in events for choice in event["choices"])


@pytest.mark.parametrize(
    "sampling",
    [pytest.param({}, marks=pytest.mark.nightly), {"temperature": 1.0, "seed": 7, "top_p": 0.9}],
    ids=["greedy", "seeded"],
)
def test_a_stream_survives_kill_9_and_a_fresh_executor(start: Callable[..., Any], sampling: dict[str, Any]) -> None:
    stack = start()
    first = stack.real("one", "--max-num-seqs", "4")
    stack.ready()
    undisturbed = stack.text(PROMPT, 60, **sampling)
    events = stack.stream(PROMPT, 60, **sampling)
    begun = [next(events) for _ in range(5)]
    first.kill()
    stack.services.processes.remove(first)
    stack.real("two", "--max-num-seqs", "4")
    assert join(iter(begun)) + join(events) == undisturbed
    stack.until_idle()
    assert stack.metric("gilir_executors_lost_total") == 1


@pytest.mark.nightly
def test_a_stream_moves_to_the_other_of_two_real_executors(start: Callable[..., Any]) -> None:
    stack = start()
    both = {name: stack.real(name, "--max-num-seqs", "4") for name in ("one", "two")}
    stack.ready()
    stack.until(lambda: stack.metric("gilir_lanes") == 2, "both executors")
    undisturbed = stack.text(PROMPT, 120)
    events = stack.stream(PROMPT, 120)
    begun = [next(events) for _ in range(5)]
    stack.until(lambda: len(stack.planned_requests()) == 2, "the stream in the plan log")
    running_on = str(stack.plan_records()[-1]["lane"])
    both[running_on].kill()
    stack.services.processes.remove(both[running_on])
    assert join(iter(begun)) + join(events) == undisturbed
    assert {record["lane"] for record in stack.plan_records()} == {"one", "two"}
    stack.until_idle()


def test_two_executors_and_one_is_killed(start: Callable[..., Any]) -> None:
    stack = start()
    victim, other = (stack.fake(name, Script(delay_s=0.01)) for name in ("one", "two"))
    stack.ready()
    stack.until(lambda: stack.metric("gilir_lanes") == 2, "both executors")
    prompts = [[20 + i, 30, 40] for i in range(8)]
    undisturbed = [stack.text(prompt, 60) for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        texts = [pool.submit(lambda p: join(stack.stream(p, 60)), prompt) for prompt in prompts]
        before = len(victim.plans)
        stack.until(lambda: len(victim.plans) > before + 10, "work on the victim")
        victim.kill()
        assert [text.result(60) for text in texts] == undisturbed
    assert other.is_running
    count = len(victim.plans)
    stack.until_idle()
    assert len(victim.plans) == count


@pytest.mark.parametrize(
    "action",
    [
        Action.DIE_AFTER,
        Action.SILENCE,
        Action.FAULT,
        pytest.param(Action.JUNK, marks=pytest.mark.nightly),
        pytest.param(Action.SHORT, marks=pytest.mark.nightly),
    ],
)
def test_each_way_to_fail_is_survived_by_a_replacement(start: Callable[..., Any], action: Action) -> None:
    stack = start("--heartbeat-ms", "100", "--heartbeat-timeout-s", "1")
    stack.fake("reference")
    stack.ready()
    undisturbed = stack.text([5, 6, 7], 40)
    stack.fakes.pop().kill()
    stack.until(lambda: stack.client.get("/health/ready").status_code == 503, "the loss to be noticed")
    stack.fake("failing", Script(actions={12: action}))
    stack.ready()
    result: list[str] = []
    reader = threading.Thread(target=lambda: result.append(join(stack.stream([5, 6, 7], 40))))
    reader.start()
    stack.until(lambda: stack.metric("gilir_executors_lost_total") >= 2, "the failure to be noticed")
    stack.fake("substitute")
    reader.join(60)
    assert result == [undisturbed]
    stack.until_idle()


def test_without_a_replacement_everything_ends_plainly_and_service_comes_back(start: Callable[..., Any]) -> None:
    stack = start("--hold-s", "1.5")
    fake = stack.fake(script=Script(delay_s=0.02))
    stack.ready()
    with ThreadPoolExecutor(2) as pool:
        plain = pool.submit(stack.complete, [5, 6], 500)
        stream = pool.submit(lambda: list(stack.stream([5, 7], 500)))
        stack.until(lambda: stack.metric("vllm:num_requests_running") == 2, "both to run")
        fake.kill()
        stack.until(lambda: stack.client.get("/health/ready").status_code == 503, "readiness to go")
        assert stack.client.get("/health/live").status_code == 200
        answer = plain.result(30)
        assert answer.status_code == 503 and "no executor" in answer.json()["error"]["message"]
        last = stream.result(30)[-1]
        assert "no executor" in last["error"]["message"]
    stack.until(lambda: not stack.client.get("/v1/models").json()["data"], "the model to be listed no more")
    refused = stack.complete([5, 6], 5)
    assert refused.status_code == 503 and refused.elapsed.total_seconds() < 1
    stack.fake("again")
    stack.ready()
    assert stack.complete([5, 6], 5).status_code == 200


def pause(processes: tuple[Process, ...], seconds: float) -> None:
    """As where their machine does."""
    for process in processes:
        os.kill(process.pid, signal.SIGSTOP)
    time.sleep(seconds)
    for process in processes:
        os.kill(process.pid, signal.SIGCONT)


def test_a_stopped_executor_is_noticed_and_its_late_result_ignored(start: Callable[..., Any]) -> None:
    stack = start("--heartbeat-ms", "100", "--heartbeat-timeout-s", "1")
    frozen = stack.real("frozen", "--max-num-seqs", "4", "--scheduler-timeout-s", "1")
    stack.ready()
    undisturbed = stack.text(PROMPT, 60)
    pause((stack.scheduler, frozen), 1.6)
    assert stack.text(PROMPT, 5) and stack.metric("gilir_executors_lost_total") == 0, "both stood still"
    events = stack.stream(PROMPT, 60)
    begun = [next(events) for _ in range(3)]
    os.kill(frozen.pid, signal.SIGSTOP)
    stack.until(lambda: stack.metric("gilir_lanes") == 0, "the silence to be noticed")
    stack.real("other", "--max-num-seqs", "4")
    assert join(iter(begun)) + join(events) == undisturbed
    os.kill(frozen.pid, signal.SIGCONT)
    stack.until(lambda: stack.metric("gilir_lanes") == 2, "the thawed one to attach anew")
    stack.until_idle()


def test_no_prefix_outlives_its_executor(start: Callable[..., Any]) -> None:
    stack = start()
    first = stack.fake("one")
    stack.ready()
    prompt = [(11 * i) % 900 + 5 for i in range(4 * 16 + 3)]
    cold = stack.complete(prompt, 20).json()
    warm = stack.complete(prompt, 20).json()
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] == 64
    first.kill()
    stack.until(lambda: stack.metric("gilir_lanes") == 0, "the loss to be noticed")
    second = stack.fake("two")
    stack.ready()
    after = stack.complete(prompt, 20).json()
    assert after["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second.plans[0].new[0].computed == 0
    assert cold["choices"][0]["text"] == warm["choices"][0]["text"] == after["choices"][0]["text"]
    assert second.runner.pseudo.num_corrupt == 0


def test_junk_from_strangers_harms_nobody(start: Callable[..., Any]) -> None:
    stack = start()
    stack.fake(script=Script(delay_s=0.005))
    stack.ready()
    undisturbed = stack.text([5, 6, 7], 60)
    with ThreadPoolExecutor(1) as pool, zmq.Context() as context:
        text = pool.submit(lambda: join(stack.stream([5, 6, 7], 60)))
        with context.socket(zmq.DEALER) as stranger:
            stranger.linger = 1000
            stranger.connect(stack.services.executor_address)
            for junk in (
                b"",
                b"\x45",
                b"\x92\x01",
                b"\xc1",
                b"\xdd\xff\xff\xff\xff",
                b"\x81\xa1a\x01",
                b"\x94\x02\x01",
            ):
                stranger.send(junk)
                stranger.send_multipart([junk, junk, junk])
            assert text.result(60) == undisturbed
    stack.until(lambda: stack.metric("gilir_junk_messages_total") >= 14, "the junk to be counted")
    assert stack.metric("gilir_lanes") == 1


def test_an_executor_with_other_weights_is_refused_beside_the_first(start: Callable[..., Any]) -> None:
    stack = start()
    stack.fake("one")
    stack.ready()
    odd = stack.services.start_executor(
        "--model", "/nonexistent", "--served-model-name", "model", module="executor_svc.fake", name="odd"
    )
    stack.until(lambda: "fingerprint" in odd.log.read_text(), "the refusal and its reason")
    assert stack.metric("gilir_lanes") == 1
    assert stack.complete([5, 6], 5).status_code == 200
