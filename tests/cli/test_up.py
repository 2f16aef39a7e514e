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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import httpx
import psutil
import pytest

from common.logs import COMPILING
from common.settings import CONFIG_VARIABLE
from deploy.local import ROOT
from scheduler_svc.cli import main
from scheduler_svc.cli.up.command import hints
from scheduler_svc.cli.up.config import Mistakes, Overrides, dialled, load

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


# --- the configuration ---


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Writes a configuration; what reading it leaves in the environment is taken back."""
    monkeypatch.setenv(CONFIG_VARIABLE, "")

    def write(text: str) -> Path:
        path = tmp_path / "gilir.toml"
        path.write_text(text)
        return path

    return write


EVERY_TABLE = """
[scheduler]
port = 9000
max_num_seqs = 4
[executor]
threads = 1
[up]
logs = "logs"
[[up.executor]]
name = "small"
num-blocks = 64
[[up.executor]]
device = "cpu"
cuda_graphs = false
"""


def test_a_file_says_what_runs_and_flags_go_before_it(
    config: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = config(EVERY_TABLE)
    monkeypatch.setattr("scheduler_svc.cli.up.config.check_executors", lambda *_: [])
    found = load(Overrides(config=path, port=9001, model="/m", sets=("scheduler.kv=contiguous",)), tmp_path)
    assert (found.settings.port, found.settings.max_num_seqs, found.settings.kv) == (9001, 4, "contiguous")
    address = f"ipc://{tmp_path}/executors.sock"
    assert found.settings.executor_bind == address and found.logs == Path("logs")
    assert list(found.executors) == ["small", "executor-1"]
    assert found.executors["small"][:2] == ("--num-blocks", "64")
    assert found.executors["executor-1"][:3] == ("--device", "cpu", "--no-cuda-graphs")
    for name, flags in found.executors.items():
        assert flags[-6:] == ("--scheduler", address, "--model", "/m", "--name", name)


def test_executors_dial_where_the_scheduler_is_told_to_listen(
    config: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GILIR_EXECUTOR_BIND", "tcp://127.0.0.1:5599")
    found = load(Overrides(executors=3), tmp_path)
    assert found.executors["executor-2"] == ("--scheduler", "tcp://127.0.0.1:5599", "--name", "executor-2")
    assert dialled("tcp://0.0.0.0:1") == "tcp://127.0.0.1:1" and dialled("tcp://[::]:1") == "tcp://[::1]:1"
    assert dialled("tcp://10.0.0.1:1") == "tcp://10.0.0.1:1" and dialled("ipc:///run/x") == "ipc:///run/x"


def test_each_mistake_of_a_file_is_a_line_that_names_the_field(
    config: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    text = '[scheduler]\nmax_num_seqs = "lots"\nnonsense = 1\n[executor]\ndtype = "float99"\n[up]\nexecutors = 2\n'
    path = config(text + "[frontend]\ngrammar_cpu_s = 0\n[admin]\nport = 1\n")
    assert main(["up", "--config", str(path)]) == 2
    lines = capsys.readouterr().err.splitlines()
    told = [line.removeprefix(f"error: {path}: ").split(":")[0] for line in lines]
    wanted = ["[scheduler] max-num-seqs", "[scheduler] nonsense", "[frontend] grammar-cpu-s", "[admin] port"]
    wanted += ["[executor] dtype"]
    assert told == wanted, lines


def test_the_hints_can_be_pasted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    monkeypatch.chdir(Path(sys.executable).parents[2])
    told = hints("http://127.0.0.1:1", asks_for_key=True)
    folder = Path(sys.executable).parent
    assert told.startswith(f"try:   {folder.parent.name}/{folder.name}/gilir chat --url http://127.0.0.1:1\n")
    assert '-H "Authorization: Bearer $GILIR_API_KEY"' in told
    assert "Authorization" not in hints("http://127.0.0.1:1", asks_for_key=False)


def test_mistakes_hide_no_others(config: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    text = '[scheduler]\nprot = 1\n[up]\nlog = "x"\n[[up.executor]]\nname = "a"\nnonsense = 1\ndevice = "tpu"\n'
    path = config(text)
    sets = ("--set", "scheduler.foo=1", "--set", "executor.max_num_seqs=0", "--set", "executor.foo=true")
    assert main(["up", "--config", str(path), *sets]) == 2
    told = [line.removeprefix("error: ").rpartition(": ")[0] for line in capsys.readouterr().err.splitlines()]
    assert told == [
        f"{path}: [up] log",
        "--set scheduler.foo",
        f"{path}: [scheduler] prot",
        f"{path}: [[up.executor]] a nonsense",
        "--set executor.foo",
        f"{path}: [[up.executor]] a device",
        "--set executor.max_num_seqs",
    ]


def test_a_table_that_there_is_not_is_told_once(
    config: Callable[[str], Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler_svc.cli.up.config.check_executors", lambda *_: [])
    path = config("[executr]\n")
    assert main(["up", "--config", str(path)]) == 2
    line = f"error: {path}: there is no table [executr], only scheduler, frontend, executor, admin, up"
    assert capsys.readouterr().err.splitlines() == [line]


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        ("--max-num-seqs=8", "--set scheduler.max_num_seqs=8 --set executor.max_num_seqs=8"),
        ("--max-model-len", "as --set executor.max_model_len=VALUE"),
        ("--api-keys=k", "as --set scheduler.api_keys=k"),
        ("--api-key", "set GILIR_API_KEY"),
        ("m", "as --model m"),
    ],
)
def test_an_argument_of_other_servers_is_answered_by_what_to_write(
    argument: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["up", argument])
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "[up]\nexecutor_count = 2\nexecutors = -1\n",
            ["[up] executor_count: there", "[up] executors: must be"],
        ),
        ("[up]\nlogs = 3\nexecutor = 4\n", ["[up] logs: must be a folder", "[up] executor: must be tables"]),
        (
            "[up]\nexecutors = 1\n[[up.executor]]\n[[up.executor]]\n",
            ["[up] executors: is 1, but [[up.executor]] stands"],
        ),
        ('[[up.executor]]\nname = "a"\n[[up.executor]]\nname = "a"\n', ["[[up.executor]] name: there are two of 'a'"]),
        ('[[up.executor]]\nname = "scheduler"\n', ["[[up.executor]] name: must be 1 to 100"]),
        ('[[up.executor]]\nname = "../../x"\n', ["[[up.executor]] name: must be 1 to 100"]),
        ('[[up.executor]]\nname = ""\n', ["[[up.executor]] name: must be 1 to 100"]),
        ("[[up.executor]]\nmodel = [1]\n", ["[[up.executor]] model: must be one value (got [1])"]),
        ("up = 3\n", ["up must be a table"]),
        ("[up\n", ["Expected ']'"]),
    ],
)
def test_mistakes_of_the_own_table(
    text: str,
    told: list[str],
    config: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("scheduler_svc.cli.up.config.check_executors", lambda *_: [])
    path = config(text)
    with pytest.raises(Mistakes) as mistakes:
        load(Overrides(config=path), tmp_path)
    assert len(mistakes.value.args) == len(told)
    for line, start in zip(mistakes.value.args, told, strict=True):
        assert str(line).startswith(f"{path}: {start}"), line


def test_mistakes_of_flags(tmp_path: Path, config: Callable[[str], Path]) -> None:
    for text in ("port=1", "scheduler.port", "core.port=1", "scheduler.=1"):
        with pytest.raises(Mistakes, match="must be scheduler"):
            load(Overrides(sets=(text,)), tmp_path)
    with pytest.raises(Mistakes, match="--executors: must be a number from 0 to 64"):
        load(Overrides(executors=65), tmp_path)
    with pytest.raises(Mistakes, match=r"no\.toml: No such file"):
        load(Overrides(config=tmp_path / "no.toml"), tmp_path)
