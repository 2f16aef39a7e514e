"""`make serve` and `make demo` as a user meets them: the ready line, signals, plain messages."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import IO

import httpx
import psutil
import pytest

from common.logs import COMPILING
from deploy.local import ROOT


def serve(*flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "deploy.serve", *flags]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def first_line(stream: IO[str] | None) -> str:
    """But for the one that comes where the kernels are not compiled yet."""
    assert stream is not None
    line = stream.readline().rstrip("\n")
    return stream.readline().rstrip("\n") if line.startswith(COMPILING) else line


@pytest.fixture
def served() -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = serve("--port", str(free_port()))
    try:
        yield process, first_line(process.stdout)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)])
def test_serves_until_a_signal_and_leaves_nothing_behind(
    served: tuple[subprocess.Popen[str], str], number: signal.Signals
) -> None:
    process, line = served
    match = re.fullmatch(r"ready: (http://127\.0\.0\.1:\d+)", line)
    assert match, f"the first line is {line!r}"
    url = match[1]
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "In the beginning", "max_tokens": 5}, timeout=60)
    assert answer.status_code == 200
    children = [int(pid) for pid in open(f"/proc/{process.pid}/task/{process.pid}/children").read().split()]  # noqa: SIM115, PTH123
    assert len(children) == 2
    process.send_signal(number)
    assert process.wait(20) == 0
    for pid in children:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health/live")


def test_an_executor_that_dies_is_started_again_and_its_stream_goes_on(
    served: tuple[subprocess.Popen[str], str],
) -> None:
    process, line = served
    url = line.removeprefix("ready: ")
    body = {"prompt": "In the beginning", "max_tokens": 300, "temperature": 0, "ignore_eos": True}
    whole = httpx.post(f"{url}/v1/completions", json=body, timeout=120).json()["choices"][0]["text"]
    with httpx.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}, timeout=120) as answer:
        chunks = (line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: {"))
        text = json.loads(next(chunks))["choices"][0]["text"]
        executor = next(p for p in psutil.Process(process.pid).children() if "executor_svc" in p.cmdline())
        executor.kill()
        for chunk in chunks:
            text += json.loads(chunk)["choices"][0]["text"]
    assert text == whole


def test_a_taken_port_is_said_plainly() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = serve("--port", str(taken.getsockname()[1]))
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "Address already in use" in errors and "Traceback" not in errors


def test_a_model_that_is_not_there_is_said_plainly() -> None:
    process = serve("--port", str(free_port()), "--model", "/no/such/model")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "/no/such/model" in errors and "Traceback" not in errors
