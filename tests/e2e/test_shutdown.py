"""Starting and stopping in any order, with plain messages."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deploy.local import ROOT, LocalServices
from executor_svc.script import Script


def test_sigterm_ends_an_open_stream_with_an_error_event_and_status_0(start: Callable[..., Any]) -> None:
    stack = start("--grace-s", "1")
    fake = stack.fake(script=Script(delay_s=0.05))
    stack.ready()
    events: list[dict[str, Any]] = []
    reader = threading.Thread(target=lambda: events.extend(stack.stream([5, 6, 7], 900)))
    reader.start()
    stack.until(lambda: len(fake.plans) > 3, "the stream to run")
    assert stack.scheduler.stop(timeout_s=60) == 0
    reader.join(60)
    assert "stopping" in events[-1]["error"]["message"]
    assert "Traceback" not in stack.scheduler.log.read_text()


def test_running_requests_finish_within_the_grace(start: Callable[..., Any]) -> None:
    stack = start("--grace-s", "8")
    fake = stack.fake(script=Script(delay_s=0.02))
    stack.ready()
    texts: list[str] = []
    reader = threading.Thread(target=lambda: texts.append(stack.text([5, 6, 7], 40)))
    reader.start()
    stack.until(lambda: len(fake.plans) > 3, "the request to run")
    assert stack.scheduler.stop(timeout_s=60) == 0
    reader.join(60)
    assert len(texts) == 1 and texts[0]


def test_an_executor_that_starts_first_waits_for_the_scheduler(start: Callable[..., Any], model_folder: Any) -> None:
    with LocalServices() as services:
        services.start_executor("--model", str(model_folder), module="executor_svc.fake")
        services.start_scheduler()
        services.wait_ready(60)
        assert services.stop() == {"executor-0": 0, "scheduler": 0}


def test_a_killed_scheduler_leaves_no_frontend_and_its_port_free(start: Callable[..., Any]) -> None:
    stack = start()
    stack.until(lambda: stack.client.get("/health/live").status_code == 200, "the frontend")
    pid = stack.scheduler.pid
    (frontend,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    stack.scheduler.kill()
    stack.until(lambda: not Path(f"/proc/{frontend}").exists(), "the frontend to end", patience_s=15)
    with socket.create_server(("127.0.0.1", int(stack.url.rsplit(":", 1)[1]))):
        pass
    stack.services.processes.remove(stack.scheduler)


def test_a_taken_port_gives_one_plain_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "scheduler_svc", "--port", str(port), "--executor-bind", "tcp://127.0.0.1:*"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.strip() == f"error: cannot listen on 127.0.0.1:{port}: Address already in use"


def test_a_bind_beyond_loopback_without_keys_is_refused() -> None:
    command = [sys.executable, "-m", "scheduler_svc", "--port", "0", "--executor-bind", "tcp://0.0.0.0:5570"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "open to the network" in done.stderr
