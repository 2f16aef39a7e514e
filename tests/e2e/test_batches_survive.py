"""Batches outlive the scheduler: killed at any moment, or told to end. No line is lost, repeated or there twice."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from executor_svc.script import Script

NUM_LINES = 48


def lines(count: int, max_tokens: int) -> bytes:
    rows = [
        {
            "custom_id": f"line-{i}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": [5 + i, 6, 7], "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True},
        }
        for i in range(count)
    ]
    return b"\n".join(json.dumps(row).encode() for row in rows)


class Survivor:
    """A stack whose scheduler comes and goes, and one batch."""

    def __init__(self, stack: Any, folder: Path, content: bytes) -> None:
        self.stack, self.folder, self._num_passed = stack, folder, 0
        upload = stack.client.post("/v1/files", files={"file": ("in", content)}, data={"purpose": "batch"})
        body = {"input_file_id": upload.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        self.batch_id = stack.client.post("/v1/batches", json=body).json()["id"]

    def finished(self) -> dict[int, bytes]:
        """Results that are committed, by number of line: read from the file, whoever runs."""
        connection = sqlite3.connect(self.folder / "batches.sqlite3", timeout=60)
        try:
            found = connection.execute(
                "SELECT number, result FROM lines WHERE batch_id = ? AND outcome = 'completed'", (self.batch_id,)
            )
            return dict(found.fetchall())
        finally:
            connection.close()

    def batch(self) -> dict[str, Any]:
        try:
            answer = self.stack.client.get(f"/v1/batches/{self.batch_id}")
        except httpx.TransportError:
            return {"status": "none"}
        return dict(answer.json()) if answer.status_code == 200 else {"status": "none"}

    def restart(self) -> None:
        self.stack.until(self._port_is_free, "the frontends to end")
        self.stack.scheduler = self.stack.services.start_scheduler()

    def _port_is_free(self) -> bool:
        try:
            httpx.get(f"{self.stack.url}/health/live", timeout=1)
        except httpx.ConnectError:
            return True
        except httpx.TransportError:
            return False
        return False

    def advance(self) -> None:
        """Let the plan pass that waits at the executor, which is held; if there is one now."""
        fake = self.stack.fakes[0]
        if fake.runner.num_plans > self._num_passed:
            self._num_passed += 1
            fake.release(1)

    def advance_until_finished(self, count: int) -> None:
        def enough() -> bool:
            for _ in range(4):
                self.advance()
                time.sleep(0.004)
            return len(self.finished()) >= count

        self.stack.until(enough, f"{count} lines to be finished")

    def check(self, before: dict[int, bytes]) -> None:
        """Wait for the end: every line is there once, and what was finished before is what it was."""
        self.stack.until(lambda: self.batch()["status"] == "completed", "the batch to be completed")
        batch = self.batch()
        total = batch["request_counts"]["total"]
        assert batch["request_counts"] == {"total": total, "completed": total, "failed": 0}
        assert batch["error_file_id"] is None
        content = self.stack.client.get(f"/v1/files/{batch['output_file_id']}/content").content
        rows = content.splitlines()
        assert [json.loads(row)["custom_id"] for row in rows] == [f"line-{i}" for i in range(total)]
        assert all(rows[number - 1] == result for number, result in before.items())
        body = json.loads(rows[3])["response"]["body"]
        assert body["choices"][0]["text"] == self.stack.text([8, 6, 7], body["usage"]["completion_tokens"])


@pytest.fixture
def survivor(start: Callable[..., Any], tmp_path: Path) -> Iterator[Callable[..., Survivor]]:
    def starter(count: int, max_tokens: int, *flags: str, delay_s: float = 0.0, held: bool = False) -> Survivor:
        stack = start("--batch-dir", str(tmp_path / "batches"), *flags)
        fake = stack.fake(script=Script(delay_s=delay_s))
        if held:
            fake.hold()
        stack.ready()
        return Survivor(stack, tmp_path / "batches", lines(count, max_tokens))

    yield starter


@pytest.mark.parametrize("shares", [(20,), pytest.param((0, 12, 24), marks=pytest.mark.nightly)])
def test_a_killed_scheduler_loses_and_repeats_nothing(
    survivor: Callable[..., Survivor], shares: tuple[int, ...]
) -> None:
    """It is killed each time that so many lines are finished."""
    run, before, moments = survivor(NUM_LINES, 12, held=True), {}, random.Random(20)
    for share in shares:
        run.advance_until_finished(share)
        # Lines of 12 tokens on eight seats: eight plans more end eight lines at most.
        for _ in range(moments.randrange(9)):
            run.advance()
            time.sleep(moments.uniform(0, 0.02))
        run.stack.scheduler.kill()
        found = run.finished()
        assert before.items() <= found.items()
        before = found
        run.restart()
    assert 20 <= len(before) < NUM_LINES, "the last kill was in mid-batch"
    run.stack.fakes[0].release()
    run.check(before)


@pytest.mark.nightly
def test_a_killed_runner_is_started_anew_and_sigterm_leaves_lines_in_flight_for_the_next_start(
    survivor: Callable[..., Survivor],
) -> None:
    run = survivor(8, 200, "--grace-s", "30", delay_s=0.01)
    run.stack.until(lambda: run.stack.metric("vllm:num_requests_running") == 8, "the lines to run")
    os.kill(runners(run)[0], signal.SIGKILL)
    run.stack.until(lambda: len(runners(run)) == 2, "a new runner")
    run.stack.until(lambda: run.stack.metric("vllm:num_requests_running") == 0, "the old one's lines to be dropped")
    run.stack.until(lambda: run.stack.metric("vllm:num_requests_running") == 8, "the new one's lines to run")
    assert run.stack.scheduler.stop(timeout_s=60) == 0
    assert run.finished() == {}, "it did not wait for lines that may run again"
    run.restart()
    run.check({})
    run.stack.until_idle()


def runners(run: Survivor) -> list[int]:
    """Process ids of the runners so far, from the scheduler's log."""
    log = re.sub(r"\x1b\[\d*m", "", run.stack.scheduler.log.read_text())
    return [int(pid) for pid in re.findall(r"child=batch-runner pid=(\d+)", log)]
