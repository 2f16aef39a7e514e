"""Real processes on loopback: fixtures that start a scheduler with its frontend, and executors real or scripted."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from common.wire import Limits
from deploy.local import ROOT, LocalServices, Process
from executor_svc.fake import FakeExecutor
from executor_svc.fake_model import card_from_folder, readable_tokens
from executor_svc.script import Script
from scheduler_svc.plan_log.reader import rows

MODEL = Path(os.environ.get("GILIR_TEST_MODEL") or ROOT / "executor_svc" / "default_model")
PATIENCE_S = 60.0


class Stack:
    """A running scheduler service, its executors, and a client."""

    def __init__(self, *scheduler_flags: str) -> None:
        # On a busy machine a real executor may take longer to start than the scheduler's own 30 s.
        self.services = LocalServices(scheduler_flags=["--hold-s", "300", *scheduler_flags])
        self.scheduler: Process = self.services.start_scheduler()
        self.client = httpx.Client(base_url=self.services.url, timeout=PATIENCE_S)
        self.fakes: list[FakeExecutor] = []

    @property
    def url(self) -> str:
        return self.services.url

    def real(self, name: str = "", *flags: str) -> Process:
        """Start a real executor with the embedded model."""
        return self.services.start_executor(
            "--model", str(MODEL), "--dtype", "float32", "--threads", "1", *flags, name=name
        )

    def fake(self, name: str = "fake", script: Script | None = None, **limits: int) -> FakeExecutor:
        """Start a scripted executor in this process; it brings the embedded model's tokenizer."""
        chosen = {
            "block_size": 16, "num_blocks": 256, "num_host_blocks": 0, "max_num_seqs": 8, "max_num_batched_tokens": 256
        } | limits  # fmt: skip
        card, script = card_from_folder(MODEL, "model"), script or Script()
        script.alphabet = script.alphabet or readable_tokens(card)
        fake = FakeExecutor(
            self.services.executor_address,
            script,
            name=name,
            model=card,
            limits=Limits(**chosen),
            record_plans=True,
        ).start()
        self.fakes.append(fake)
        return fake

    def ready(self) -> None:
        """Block until requests can be served and the model is known to the frontend."""
        self.services.wait_ready(PATIENCE_S)
        self.until(lambda: self.client.get("/v1/models").json()["data"], "the model to be listed")

    def until(self, condition: Callable[[], object], what: str, patience_s: float = PATIENCE_S) -> None:
        """Poll until the condition holds."""
        deadline = time.monotonic() + patience_s
        while not condition():
            assert time.monotonic() < deadline, f"waited {patience_s:g} s for {what}\n{self._logs()}"
            time.sleep(0.02)

    def _logs(self) -> str:
        """The end of each process's."""
        processes = [self.scheduler, *self.services.processes]
        return "\n".join(f"--- {process.name}\n{process.log_tail(30)}" for process in dict.fromkeys(processes))

    def metric(self, name: str) -> float:
        """Sum of a metric's series."""
        text = self.client.get("/metrics").text
        found = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        assert found, f"no metric {name}"
        return sum(float(value) for value in found)

    def until_idle(self) -> None:
        """Nothing waits or runs, and every block is free or evictable."""
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "gilir_live_sequences")
        self.until(lambda: all(self.metric(name) == 0 for name in names), "the service to be idle")
        self.until(lambda: self.metric("gilir_kv_blocks_referenced") == 0, "all blocks to be given back")

    def complete(self, prompt: object, max_tokens: int, **fields: object) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0} | fields
        return self.client.post("/v1/completions", json=body)

    def text(self, prompt: object, max_tokens: int, **fields: object) -> str:
        answer = self.complete(prompt, max_tokens, **fields)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    def stream(self, prompt: object, max_tokens: int, **fields: object) -> Iterator[dict[str, object]]:
        """The decoded events of a streamed completion, without the closing [DONE], which must come."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0, "stream": True}
        with self.client.stream("POST", "/v1/completions", json=body | fields) as answer:
            assert answer.status_code == 200, answer.read()
            done = False
            for line in answer.iter_lines():
                assert not done or not line, "something after [DONE]"
                if line == "data: [DONE]":
                    done = True
                elif line:
                    yield json.loads(line.removeprefix("data: "))
            assert done, "the stream did not close with [DONE]"

    def plan_records(self) -> list[dict[str, Any]]:
        """The plan log so far."""
        return list(rows(self.services.plan_log))

    def planned_requests(self) -> set[str]:
        """Sequences that the plan log has seen in an iteration."""
        records = [record for record in self.plan_records() if "decodes" in record]
        return {row[1] for record in records for row in [*record["decodes"], *record["prefills"]]}

    def stop(self) -> dict[str, int]:
        for fake in self.fakes:
            fake.kill()
        self.client.close()
        return self.services.stop()


def _starter() -> Iterator[Callable[..., Stack]]:
    """Start a stack with some scheduler flags; it is stopped at the end of the test, or of the module."""
    stacks: list[Stack] = []

    def starter(*scheduler_flags: str) -> Stack:
        stacks.append(Stack(*scheduler_flags))
        return stacks[-1]

    yield starter
    for stack in stacks:
        stack.stop()


start = pytest.fixture(_starter, name="start")
module_start = pytest.fixture(_starter, name="module_start", scope="module")


@pytest.fixture(scope="module")
def real_stack() -> Iterator[Stack]:
    """One scheduler and one real executor for all tests of a module."""
    stack = Stack("--max-num-seqs", "8")
    stack.real()
    stack.ready()
    yield stack
    statuses = stack.stop()
    assert set(statuses.values()) == {0}, statuses


@pytest.fixture
def model_folder() -> Path:
    return MODEL
