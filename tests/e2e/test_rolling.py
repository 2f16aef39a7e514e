"""Executors are rolled, swapped for another model and stood in for by a spare, and no client notices (C01, C29)."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest

from common.wire import ModelCard
from deploy.local import ROOT
from executor_svc.fake import FakeExecutor
from executor_svc.fake_model import card_from_folder, readable_tokens
from executor_svc.script import Script
from tests.e2e.test_failover import join

KEY = "a-key-for-tests-0123456789"
PROMPTS = [[20 + i, 30, 40, 50 + 3 * i] for i in range(5)]
NUM_TOKENS = 100


class Operator:
    """Talks to the admin API of a stack."""

    def __init__(self, stack: Any, **headers: str) -> None:
        self._stack = stack
        found = re.search(r"admin API.*(http://[\d.:]+)", stack.scheduler.log.read_text())
        assert found, "the log does not say where the admin API is"
        self.client = httpx.Client(base_url=f"{found[1]}/admin", headers=headers, timeout=60)

    def __enter__(self) -> Operator:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def states(self) -> dict[str, str]:
        try:
            answer = self.client.get("/executors")
        except httpx.ConnectError:
            return {}
        return {told["name"]: told["state"] for told in answer.json().get("data", ())}

    def post(self, path: str, **fields: Any) -> None:
        answer = self.client.post(path, json=fields) if fields else self.client.post(path)
        assert answer.status_code == 202, answer.text

    def until(self, **states: str) -> None:
        """Wait until these executors, and no others, are attached, in these states."""
        wanted = {name.replace("_", "-"): state for name, state in states.items()}
        self._stack.until(lambda: self.states() == wanted, f"executors to be {wanted}")


@pytest.fixture
def fakes(model_folder: Path) -> Any:
    """Starts scripted executors that take five milliseconds for an iteration; they end with the test."""
    running = ExitStack()

    def starter(stack: Any, name: str, *, spare: bool = False, model: ModelCard | None = None) -> FakeExecutor:
        card = model or card_from_folder(model_folder, "model")
        script = Script(delay_s=0.005, alphabet=readable_tokens(card))
        address = stack.services.executor_address
        return running.enter_context(FakeExecutor(address, script, name=name, model=card, spare=spare))

    with running:
        yield starter


def test_two_executors_are_rolled_under_load(start: Callable[..., Any], fakes: Any, tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_text(KEY)
    stack = start("--admin-port", "0", "--admin-key-file", str(key_file))
    olds = {name: fakes(stack, name) for name in ("old-0", "old-1")}
    stack.ready()
    over = Event()

    def load(prompt: list[int]) -> list[str]:
        """The same request again and again until the roll is over."""
        texts = []
        while not texts or not over.is_set():
            texts.append(join(stack.stream(prompt, NUM_TOKENS)))
        return texts

    with Operator(stack, authorization=f"Bearer {KEY}") as operator, ThreadPoolExecutor(len(PROMPTS)) as pool:
        operator.until(old_0="attached", old_1="attached")
        assert httpx.get(operator.client.base_url.join("executors")).status_code == 401
        undisturbed = list(pool.map(lambda prompt: stack.text(prompt, NUM_TOKENS), PROMPTS))
        answers = [pool.submit(load, prompt) for prompt in PROMPTS]
        stack.until(lambda: stack.metric("vllm:num_requests_running") == len(PROMPTS), "the load")
        news = []
        for i, (name, old) in enumerate(olds.items()):
            operator.post(f"/executors/{name}/drain")
            stack.until(lambda name=name: operator.states()[name] == "paused", "the drain")
            if i:
                assert operator.client.delete(f"/executors/{name}").status_code == 202
                old.join()
            else:
                old.stop()
            news.append(fakes(stack, f"new-{i}"))
            stack.until(lambda i=i: operator.states().get(f"new-{i}") == "attached", "the replacement")
        stack.until(lambda: all(len(new.plans) > 20 for new in news), "work on the new ones")
        over.set()
        texts = [answer.result(30) for answer in answers]
        operator.until(new_0="attached", new_1="attached")
    assert [set(all_of_one) for all_of_one in texts] == [{text} for text in undisturbed]
    assert stack.metric("gilir_executors_lost_total") == 0
    stack.until_idle()


def test_a_spare_stands_in_for_a_dead_executor_and_steps_back(start: Callable[..., Any], fakes: Any) -> None:
    stack = start("--admin-port", "0")
    main, spare = fakes(stack, "main"), fakes(stack, "spare", spare=True)
    stack.ready()
    with Operator(stack) as operator:
        operator.until(main="attached", spare="spare")
        undisturbed = stack.text([5, 6, 7], NUM_TOKENS)
        events = stack.stream([5, 6, 7], NUM_TOKENS)
        begun = [next(events) for _ in range(5)]
        assert not spare.plans
        main.kill()
        assert join(iter(begun)) + join(events) == undisturbed
        assert spare.plans
        operator.until(spare="attached")
        fakes(stack, "main")
        operator.until(spare="spare", main="attached")
        (loss,) = [
            told["last_failure"] for told in operator.client.get("/executors").json()["data"] if told["name"] == "main"
        ]
        assert "connection lost" in loss["reason"]
    assert stack.metric("gilir_executor_state") == 2


def test_another_model_takes_the_place_of_the_first(start: Callable[..., Any], fakes: Any, model_folder: Path) -> None:
    stack = start("--hold-s", "2")
    first = card_from_folder(model_folder, "first")
    old = fakes(stack, "gpu-0", model=first)
    stack.ready()
    prompt = [(11 * i) % 900 + 5 for i in range(4 * 16 + 3)]
    for cached in (0, 64):
        usage = stack.complete(prompt, 5, model="first").json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == cached

    def listed() -> set[str]:
        return {model["id"] for model in stack.client.get("/v1/models").json()["data"]}

    with ThreadPoolExecutor(1) as pool:
        old.stop()
        waiting = pool.submit(stack.complete, prompt, 5, model="first")
        other = fakes(stack, "gpu-0", model=card_from_folder(model_folder, "second"))
        stack.until(lambda: "second" in listed(), "the new model")
        assert stack.complete(prompt, 5, model="second").status_code == 200
        refused = waiting.result(30)
    assert refused.status_code == 503 and "no executor" in refused.json()["error"]["message"]
    stack.until(lambda: listed() == {"second"}, "the old model to be listed no more")
    gone = stack.complete(prompt, 5, model="first")
    assert gone.status_code == 404 and gone.json()["error"]["code"] == "model_not_found"
    # The first one comes back with other weights: nothing of its former KV is found.
    other.stop()
    again = fakes(stack, "gpu-0", model=replace(first, fingerprint=b"f" * 16))
    stack.until(lambda: "first" in listed(), "the first model")
    usage = stack.complete(prompt, 5, model="first").json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0 and again.plans[0].new[0].computed == 0


def test_mistakes_at_the_start_give_one_plain_line(tmp_path: Path) -> None:
    def fail(*flags: str) -> tuple[int, str]:
        address = f"ipc://{tmp_path}/executors.sock"
        command = [sys.executable, "-m", "scheduler_svc", "--port", "0", "--executor-bind", address, *flags]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stderr.strip()

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        text = f"error: admin API: cannot listen on 127.0.0.1:{port}: Address already in use"
        assert fail("--admin-port", str(port)) == (1, text)
    status, text = fail("--admin-port", "0", "--admin-key-file", str(tmp_path / "none"))
    assert status == 1 and "No such file" in text and len(text.splitlines()) == 1
