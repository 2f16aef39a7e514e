"""What `gilir up` is to run: the file, the flags over it, and what is wrong with them in plain lines."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from common.settings import CONFIG_VARIABLE
from executor_svc.settings import ExecutorSettings
from scheduler_svc.__main__ import main as run_scheduler
from scheduler_svc.cli import main
from scheduler_svc.cli.up.command import hints
from scheduler_svc.cli.up.config import Mistakes, Overrides, dialled, load
from scheduler_svc.cli.up.devices import spread
from scheduler_svc.cli.up.hints import OF_EXECUTORS, OF_OTHER_SERVERS
from scheduler_svc.settings import SchedulerSettings


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
    dials = ("--scheduler", address)
    assert found.executors["small"] == (
        *(*dials, "--num-blocks", "64", "--model", "/m"),
        *("--device", "auto:0", "--name", "small"),
    )
    assert found.executors["executor-1"] == (
        *(*dials, "--device", "cpu", "--no-cuda-graphs", "--model", "/m"),
        *("--name", "executor-1"),
    )


def test_executors_dial_where_the_scheduler_is_told_to_listen(
    config: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GILIR_EXECUTOR_BIND", "tcp://127.0.0.1:5599")
    found = load(Overrides(executors=3), tmp_path)
    dials = ("--scheduler", "tcp://127.0.0.1:5599")
    assert found.executors["executor-2"] == (*dials, "--device", "auto:2", "--name", "executor-2")
    assert dialled("tcp://0.0.0.0:1") == "tcp://127.0.0.1:1" and dialled("tcp://[::]:1") == "tcp://[::1]:1"
    assert dialled("tcp://10.0.0.1:1") == "tcp://10.0.0.1:1" and dialled("ipc:///run/x") == "ipc:///run/x"


def test_executors_take_a_gpu_each_past_those_that_are_named() -> None:
    assert spread(["auto", "auto", "auto"]) == ["auto:0", "auto:1", "auto:2"]
    assert spread(["cuda", "cuda:0", "cpu", "auto:2", "auto", "tpu"]) == [
        *("cuda:1", "cuda:0", "cpu", "auto:2", "auto:3", "tpu"),
    ]


def test_a_device_may_be_told_in_each_place_that_settings_have(
    config: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler_svc.cli.up.config.check_executors", lambda *_: [])
    path = config('[executor]\ndevice = "cuda"\n[[up.executor]]\n[[up.executor]]\ndevice = "cuda:0"\n')

    def told(*sets: str) -> list[list[str]]:
        flags = load(Overrides(config=path, sets=sets), tmp_path).executors.values()
        return [[value for flag, value in pairwise(own) if flag == "--device"] for own in flags]

    assert told() == [["cuda:1"], ["cuda:0"]]
    assert told("executor.device=auto") == [["auto", "auto:0"], ["cuda:0", "auto", "auto:1"]]  # the last one counts
    monkeypatch.setenv("GILIR_DEVICE", "cpu")
    assert told() == [[], ["cuda:0"]]


@pytest.mark.parametrize(
    ("text", "held"), [("", ["300"]), ("[scheduler]\nhold_s = 7\n", []), ("[up]\nexecutors = 0\n", [])]
)
def test_streams_are_held_for_executors_that_are_started_again(
    text: str, held: list[str], config: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler_svc.cli.up.config.check_executors", lambda *_: [])
    flags = load(Overrides(config=config(text)), tmp_path).scheduler_flags
    assert [value for flag, value in pairwise(flags) if flag == "--hold-s"] == held


OVERRIDDEN = """
[scheduler]
max-body-mb = 9
admin_key_file = "x"
[frontend]
grace-s = 1
core = "ipc://x"
max_body_mb = 7
resume_hold_s = 9
[admin]
key_file = "y"
log_level = "debug"
[executor]
name = "x"
"""


def test_what_would_be_overridden_is_told_with_its_place(
    config: Callable[[str], Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler_svc.cli.up.config.check_executors", lambda *_: [])
    path = config(OVERRIDDEN)
    children = [
        "[frontend] grace-s: the scheduler decides this for the processes that it starts: set it in [scheduler]",
        "[frontend] core: stands in no file: the scheduler gives each process its own",
        "[frontend] max-body-mb: [scheduler] has max-body-mb, which would override it: set one of them",
        "[admin] key-file: [scheduler] has admin-key-file, which would override it: set one of them",
        "[admin] log-level: the scheduler decides this for the processes that it starts: set it in [scheduler]",
    ]
    own = "each executor has a name of its own: set it in [[up.executor]]"
    assert main(["up", "--config", str(path), "--set", "executor.name=y"]) == 2
    lines = [f"error: {path}: [executor] name: {own}", f"error: --set executor.name: {own}"]
    assert capsys.readouterr().err.splitlines() == lines + [f"error: {path}: {line}" for line in children]
    monkeypatch.setattr("sys.argv", ["scheduler", "--port", "0"])
    assert run_scheduler() == 2
    assert capsys.readouterr().err.splitlines() == [f"error: {path}: {line}" for line in children]


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
        ("--max-model-len", "; a setting of the executor is given as --set executor.max_model_len=VALUE"),
        ("--api-keys=k", "as --set scheduler.api_keys=k"),
        ("--api-key", "set GILIR_API_KEY"),
        ("m", "as --model m"),
        ("--data-parallel-size 2", "here: --executors 2\n"),
        ("--tensor-parallel-size=2", "here: a model must fit one GPU"),
        ("--no-prefix-caching", "as --set scheduler.prefix_caching=false"),
        ("--no-cuda-graphs", "as --set executor.cuda_graphs=false"),
        (
            "m --discipline fair --enforce-eager --kv lru",
            "as --set scheduler.discipline=fair\nthere is no --enforce-eager",
        ),
    ],
)
def test_an_argument_of_other_servers_is_answered_by_what_to_write(
    argument: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["up", *argument.split()])
    assert told in capsys.readouterr().err


def test_the_hints_name_settings_that_there_are() -> None:
    told = " ".join(OF_OTHER_SERVERS.values())
    for table, settings in (("scheduler", SchedulerSettings), ("executor", ExecutorSettings)):
        names = re.findall(rf"{table}\.(\w+)", told)
        assert names and set(names) <= set(settings.model_fields)
    assert set(OF_EXECUTORS) <= set(ExecutorSettings.model_fields)


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
        ('[[up.executor]]\nmodel = "a\\u0000"\n', ["[[up.executor]] model: must be one value (got 'a\\x00')"]),
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
