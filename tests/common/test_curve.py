"""The command that makes CURVE keys: files that pyzmq reads, secrets that only their owner can."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import zmq
import zmq.auth

from common.addresses import is_loopback
from common.curve import create_key_pair, main, warn_if_exposed
from executor_svc.sockets import read_key


def test_the_files_hold_a_pair_and_the_secret_one_is_private(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        public_path, secret_path = create_key_pair(tmp_path / "new", "gpu-0")
    finally:
        os.umask(old)
    assert (public_path.name, secret_path.name) == ("gpu-0.key", "gpu-0.key_secret")
    assert secret_path.stat().st_mode & 0o777 == 0o600 and public_path.stat().st_mode & 0o777 == 0o644
    assert secret_path.parent.stat().st_mode & 0o777 == 0o700
    public, secret = zmq.auth.load_certificate(secret_path)
    assert secret is not None and zmq.curve_public(secret) == public
    assert zmq.auth.load_certificate(public_path) == (public, None)
    assert zmq.auth.load_certificates(public_path.parent) == {public: True}
    assert read_key(str(public_path), "public") == public and read_key(str(secret_path), "secret") == secret
    assert secret.decode() not in public_path.read_text()


def test_the_command_overwrites_nothing_and_shows_no_secret(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scheduler", "--folder", str(tmp_path)], "curve") == 0
    secret = read_key(str(tmp_path / "scheduler.key_secret"), "secret")
    assert secret.decode() not in capsys.readouterr().out
    (tmp_path / "other.key").write_text("somebody's")
    for name in ("scheduler", "other"):
        assert main([name, "--folder", str(tmp_path)], "curve") == 1
        err = capsys.readouterr().err
        assert err.startswith("error: ") and "File exists" in err and err.count("\n") == 1
    assert read_key(str(tmp_path / "scheduler.key_secret"), "secret") == secret
    assert not (tmp_path / "other.key_secret").exists(), "half a pair is none"
    with pytest.raises(SystemExit):
        main(["../up", "--folder", str(tmp_path)], "curve")


def test_a_secret_that_others_can_read_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, secret_path = create_key_pair(tmp_path, "a")
    warn_if_exposed(secret_path)
    assert not capsys.readouterr().err
    secret_path.chmod(0o640)
    warn_if_exposed(secret_path)
    assert "can be read by others" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["", "*", "0.0.0.0", "::", "10.0.0.1", "example.org", "localhost.example.org"])
def test_beyond_loopback(host: str) -> None:
    assert not is_loopback(host)
