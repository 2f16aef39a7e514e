"""`gilir up` as a user meets it: the ready line, what is started again, signals, plain messages."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import httpx
import psutil
import pytest

from common.logs import COMPILING
from deploy.local import ROOT
from scheduler_svc.cli import main

PATIENCE_S = 60.0


class Up:
    """A running `gilir up`."""

    def __init__(self, *flags: str, temporary: Path | None = None) -> None:
        command = [sys.executable, "-m", "scheduler_svc.cli", "up", *flags]
        # A proxy is no way to this machine.
        environment = {**os.environ, "http_proxy": "http://127.0.0.1:1", "no_proxy": ""}
        if temporary is not None:
            environment["TMPDIR"] = str(temporary)
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True)

    def wait_ready(self) -> str:
        """The URL."""
        line = first_line(self.process.stdout)
        match = re.fullmatch(r"ready: (http://127\.0\.0\.1:\d+)", line)
        assert match, f"the first line is {line!r}"
        return match[1]

    def child(self, module: str) -> psutil.Process:
        children = psutil.Process(self.process.pid).children()
        return next(child for child in children if module in child.cmdline())

    def everybody(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


def first_line(stream: IO[str] | None) -> str:
    """But for the one that comes where the kernels are not compiled yet."""
    assert stream is not None
    line = stream.readline().rstrip("\n")
    return stream.readline().rstrip("\n") if line.startswith(COMPILING) else line


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def admin_url() -> str:
    return f"http://127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def temporary() -> Iterator[Path]:
    """Short: paths of sockets are."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def shared(logs: Path, admin_url: str, temporary: Path) -> Iterator[tuple[Up, str]]:
    flags = ["--port", "0", "--admin-port", admin_url.rpartition(":")[2], "--logs", str(logs)]
    up = Up(*flags, "--set", "executor.threads=1", temporary=temporary)
    try:
        yield up, up.wait_ready()
    finally:
        up.close()


def test_the_other_commands_talk_to_it(
    shared: tuple[Up, str], admin_url: str, logs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, url = shared
    assert main(["chat", "Tell me a story.", "--url", url, "--max-tokens", "5"]) == 0
    assert capsys.readouterr().out.strip()
    load_flags = ["--requests", "4", "--prompt-lengths", "fixed:9", "--output-lengths", "fixed:3"]
    assert main(["bench", "--url", url, "--json", *load_flags]) == 0
    assert json.loads(capsys.readouterr().out)["output_tokens"] == 12
    assert main(["executors", "--admin-url", admin_url]) == 0
    assert "attached" in capsys.readouterr().out
    assert main(["executors", "pause", "executor-0", "--wait", "--admin-url", admin_url]) == 0
    assert main(["top", "--once", "--url", url]) == 0
    assert re.search(r"^executor-0 +paused", capsys.readouterr().out, re.MULTILINE)
    assert main(["executors", "resume", "--model", "default_model", "--admin-url", admin_url]) == 0
    assert "listening" in (logs / "scheduler.log").read_text()


@pytest.mark.nightly
def test_an_executor_that_dies_is_started_again_and_its_stream_goes_on(shared: tuple[Up, str]) -> None:
    up, url = shared
    body = {"prompt": "In the beginning", "max_tokens": 300, "temperature": 0, "ignore_eos": True}
    undisturbed = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
    assert undisturbed.status_code == 200, undisturbed.text
    whole = undisturbed.json()["choices"][0]["text"]
    with httpx.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}, timeout=120) as answer:
        chunks = (line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: {"))
        text = json.loads(next(chunks))["choices"][0]["text"]
        up.child("executor_svc").kill()
        for chunk in chunks:
            text += json.loads(chunk)["choices"][0]["text"]
    assert text == whole


def test_a_scheduler_that_dies_is_started_again_on_its_port_and_a_signal_ends_all(
    shared: tuple[Up, str], temporary: Path
) -> None:
    up, url = shared
    up.child("scheduler_svc").kill()
    deadline = time.monotonic() + PATIENCE_S
    while not answers(url):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    everybody = up.everybody()
    assert len(everybody) >= 3  # a frontend among them
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(PATIENCE_S) == 0
    assert not any(child.is_running() for child in everybody)
    assert not list(temporary.rglob("*.sock*")), "the killed scheduler's are removed, too"
    out, err = up.process.communicate()
    assert "scheduler: ended with SIGKILL, is started again at once" in out and "Traceback" not in err
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health/live")


def answers(url: str) -> bool:
    body = {"prompt": "In the beginning", "max_tokens": 5}
    try:
        return httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_behind_whatever_ends_it(number: signal.Signals) -> None:
    up = Up("--port", "0", "--executors", "2", "--set", "executor.threads=1")
    try:
        assert answers(up.wait_ready())
        everybody = up.everybody()
        up.process.send_signal(number)
        assert up.process.wait(PATIENCE_S) == (0 if number is signal.SIGTERM else -number)
        _, left = psutil.wait_procs(everybody, PATIENCE_S)
        assert len(everybody) >= 4 and not left
    finally:
        up.close()


def test_a_taken_port_is_said_plainly() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        up = Up("--port", str(taken.getsockname()[1]))
        _, errors = up.process.communicate(timeout=PATIENCE_S)
    assert up.process.returncode == 1
    assert re.fullmatch(r"error: cannot listen on 127\.0\.0\.1:\d+: Address already in use\n", errors)


@pytest.mark.nightly
def test_a_model_that_is_not_there_is_said_plainly() -> None:
    up = Up("--port", "0", "--model", "/no/such/model")
    _, errors = up.process.communicate(timeout=PATIENCE_S)
    assert up.process.returncode == 1
    assert re.search(r"^error: executor-0: .*/no/such/model", errors, re.MULTILINE) and "Traceback" not in errors
