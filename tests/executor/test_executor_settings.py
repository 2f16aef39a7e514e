"""Settings of the executor service."""

from __future__ import annotations

from pathlib import Path

import pytest
import zmq

from executor_svc.fake_model import DEFAULT_MODEL
from executor_svc.settings import ExecutorSettings


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GILIR_CONFIG", "GILIR_MODEL", "GILIR_SCHEDULER"):
        monkeypatch.delenv(name, raising=False)


def read(*flags: str) -> ExecutorSettings:
    return ExecutorSettings.from_command_line(list(flags))


def test_defaults() -> None:
    settings = read()
    assert settings.model_source == str(DEFAULT_MODEL)
    assert (settings.block_size, settings.max_num_seqs, settings.max_num_batched_tokens) == (16, 64, 2048)
    assert settings.num_blocks is None and settings.num_host_blocks == 0
    assert settings.name and settings.dialing().server_key == b""
    transfer = settings.transfer_socket()
    assert transfer is not None and transfer.bind == "tcp://127.0.0.1:*" and not transfer.public_key
    assert read("--transfer-bind", "none").transfer_socket() is None


def test_flags_stand_above_the_environment_and_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "gilir.toml"
    file.write_text('[executor]\nblock-size = 8\nmax-num-seqs = 3\nname = "from-file"\n[scheduler]\nport = 1\n')
    monkeypatch.setenv("GILIR_CONFIG", str(file))
    monkeypatch.setenv("GILIR_MAX_NUM_SEQS", "4")
    settings = read("--name", "from-flag")
    assert (settings.block_size, settings.max_num_seqs, settings.name) == (8, 4, "from-flag")


def test_an_empty_model_is_the_embedded_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GILIR_MODEL", "")
    assert read().model_source == str(DEFAULT_MODEL)
    assert read("--model", "/models/x").model_source == "/models/x"


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--scheduler", "http://127.0.0.1:1"], "tcp:// or ipc://"),
        (["--scheduler", "tcp://10.1.2.3:5570"], "beyond this machine"),
        (["--curve-server-key", "x.key"], "go together"),
        (["--transfer-bind", "http://127.0.0.1:1"], "tcp:// or ipc://"),
        (["--transfer-bind", "tcp://10.1.2.3:5580"], "open to the network"),
        (["--transfer-bind", "tcp://0.0.0.0:5580"], "the address that other executors dial"),
        (["--transfer-bind", "tcp://*:5580"], "the address that other executors dial"),
        (["--device", "tpu"], "cpu, cuda, auto:N or cuda:N"),
        (["--dtype", "int8"], "dtype"),
        (["--block-size", "0"], "block-size"),
        (["--max-num-seqs", "many"], "max-num-seqs"),
    ],
)
def test_a_mistake_is_told_in_a_line(flags: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        read(*flags)
    assert caught.value.code == 2
    errors = capsys.readouterr().err
    assert told in errors and errors.startswith("error: ") and errors.count("\n") == 1


def test_beyond_this_machine_with_keys_or_on_purpose(tmp_path: Path) -> None:
    public, secret = zmq.curve_keypair()
    (tmp_path / "public").write_bytes(public)
    (tmp_path / "secret").write_bytes(secret)
    far = ["--scheduler", "tcp://scheduler:5570"]
    keys = ["--curve-server-key", str(tmp_path / "public"), "--curve-secret-key", str(tmp_path / "secret")]
    dialing = read(*far, *keys).dialing()
    assert (dialing.server_key, dialing.secret_key) == (public, secret)
    transfer = read(*far, *keys, "--transfer-bind", "tcp://10.1.2.3:5580").transfer_socket()
    assert transfer is not None and (transfer.public_key, transfer.secret_key) == (public, secret)
    assert read(*far, "--allow-insecure-dial").dialing().server_key == b""


def test_a_key_file_that_is_missing(tmp_path: Path) -> None:
    keys = ["--curve-server-key", str(tmp_path / "none"), "--curve-secret-key", str(tmp_path / "none")]
    with pytest.raises(OSError):
        read(*keys).dialing()
