"""Unmodified clients, each in an environment of its own (`make clients` builds them), against the real services."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from common.processes import end_with_parent
from deploy.local import ROOT, LocalServices

ROOM = Path(os.environ.get("GILIR_CLIENTS") or ROOT / ".cache" / "clients")
MODEL = ROOT / "executor_svc" / "default_model"
TEMPLATE = """\
{%- if tools %}{{ bos_token }}<|system|>Tools: {{ tools | tojson }} Write <tool_call>{"name": …}</tool_call>.<|end|>
{%- else %}{{ bos_token }}{% endif -%}
{%- for message in messages -%}
<|{{ 'user' if message.role == 'tool' else message.role }}|>{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor -%}
<|end|>
{%- endfor -%}
{%- if add_generation_prompt %}<|assistant|>{% endif -%}
"""
"""The default model's conversations, told of tools as Hermes is."""
PATIENCE_S = 900.0


class Client:
    """An installed client: the folder of its commands, and what stands in its environment."""

    def __init__(self, name: str) -> None:
        self.bin = ROOM / name / "bin"
        if not (self.bin / "python").exists():
            pytest.skip(f"{name} has no environment in {ROOM}")
        # No hub can be asked: a client that needs one must fail at once. No key of the caller's goes to a test.
        self.environment = {k: v for k, v in os.environ.items() if "API_KEY" not in k and k != "PYTHONPATH"}
        self.environment |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "OPENAI_API_KEY": "none"}

    def run(self, command: str, *arguments: str, folder: Path, **environment: str) -> str:
        """Run a command of the client in `folder` until it ends well. Returns what it wrote to stdout."""
        done = subprocess.run(
            [self.bin / command, *arguments],
            cwd=folder,
            env=self.environment | environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            preexec_fn=end_with_parent,
        )
        assert done.returncode == 0, (
            f"{command} ended with {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        )
        return done.stdout

    @contextmanager
    def serving(self, command: str, *arguments: str, folder: Path, health: str, **environment: str) -> Iterator[str]:
        """Run a command that serves until the block ends; `{port}` in an argument is its port, `health` a path that
        answers 200 once it is up. Yields its base URL.
        """
        port = free_port()
        address = f"http://127.0.0.1:{port}"
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [self.bin / command, *(argument.format(port=port) for argument in arguments)],
                cwd=folder,
                env=self.environment | environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=end_with_parent,
            )
        try:
            deadline = time.monotonic() + PATIENCE_S
            while not _answers(address + health):
                text = (folder / "log").read_text(errors="replace")
                assert process.poll() is None and time.monotonic() < deadline, text[-3000:]
                time.sleep(0.5)
            yield address
        finally:
            process.kill()
            process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(address: str) -> bool:
    try:
        return httpx.get(address, timeout=60).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the served model: the default model's weights, and a chat template that knows tools."""
    folder = tmp_path_factory.mktemp("model") / MODEL.name
    shutil.copytree(MODEL, folder, ignore=shutil.ignore_patterns("train", "__pycache__"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="session")
def services(model: Path) -> Iterator[LocalServices]:
    """A scheduler and an executor."""
    with LocalServices() as services:
        services.start_scheduler()
        services.start_executor("--model", str(model), "--dtype", "float32", "--threads", "1")
        services.wait_ready()
        yield services


@pytest.fixture(scope="module")
def url(services: LocalServices, request: pytest.FixtureRequest) -> Iterator[str]:
    """Gilir's address, without a path. With GILIR_RECORD=FOLDER what a module's client sends is written down there."""
    folder = os.environ.get("GILIR_RECORD")
    if not folder:
        yield services.url
        return
    out = Path(folder).resolve() / f"{request.path.stem.removeprefix('test_')}.jsonl"
    command = [sys.executable, Path(__file__).with_name("record.py"), "--to", services.url, "--out", out]
    recorder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=end_with_parent)
    assert recorder.stdout is not None
    yield recorder.stdout.readline().strip()
    recorder.kill()
    recorder.wait()
    recorder.stdout.close()


@pytest.fixture(scope="module")
def installed() -> Callable[[str], Client]:
    """The client of this name; skips where it is not installed."""
    return Client
