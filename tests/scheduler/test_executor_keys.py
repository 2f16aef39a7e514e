"""The folder of executors' public keys: what is put there is let in, what is taken out is refused, while all runs."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
import zmq.auth
from structlog.testing import capture_logs
from zmq.utils.monitor import recv_monitor_message

from common.curve import create_key_pair
from scheduler_svc import executor_keys
from scheduler_svc.executor_keys import CHECK_S, ExecutorKeys
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.sockets import authenticator, executor_socket

HANDSHAKE_ENDED = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
Socket = zmq.Socket[bytes]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def put(folder: Path, name: str) -> bytes:
    """Make a key pair with its public half in the folder. Returns that half."""
    public_path, secret_path = create_key_pair(folder, name)
    secret_path.unlink()
    return zmq.auth.load_certificate(public_path)[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "known"


def test_keys_come_and_go_with_their_files(folder: Path) -> None:
    clock = Clock()
    first = put(folder, "first")
    keys = ExecutorKeys(folder, clock)
    second = put(folder, "second")
    (folder / "first.key").unlink()
    clock.now += CHECK_S / 2
    assert keys.callback("*", first) and not keys.callback("*", second), "the folder was looked at just now"
    clock.now += CHECK_S
    assert not keys.callback("*", first) and keys.callback("*", second)
    # One file's key is exchanged for another: the names stay.
    third = put(folder, "third")
    (folder / "third.key").replace(folder / "second.key")
    clock.now += CHECK_S
    assert keys.callback("*", third) and not keys.callback("*", second)


def test_what_cannot_be_read_leaves_the_keys_and_is_told_once(folder: Path) -> None:
    clock = Clock()
    known = put(folder, "known")
    keys, bad = ExecutorKeys(folder, clock), folder / "bad.key"
    with capture_logs() as logs:
        for content in ("public-key", "public-key = short", "", "nothing of the kind"):
            bad.write_text(content)
            clock.now += CHECK_S
            assert keys.callback("*", known) and not keys.callback("*", b"short")
        bad.unlink()
        bad.mkdir()
        clock.now += CHECK_S
        assert keys.callback("*", known)
        bad.rmdir()
        folder.rename(folder.parent / "away")
        for _ in range(2):
            clock.now += CHECK_S
            assert keys.callback("*", known)
    errors = [entry["error"] for entry in logs if entry["log_level"] == "error"]
    assert len(errors) == 3 and all("short" not in error for error in errors)
    assert "no public key" in errors[0] and "is no file" in errors[1] and "No such file" in errors[2]


def test_a_look_that_failed_is_tried_again_though_nothing_changed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Descriptors run out for a while, just as a key is taken out and another put in."""
    clock = Clock()
    old = put(folder, "old")
    keys = ExecutorKeys(folder, clock)
    (folder / "old.key").unlink()
    new = put(folder, "new")

    def failing(_path: Path) -> tuple[bytes, None]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(zmq.auth, "load_certificate", failing)
        clock.now += CHECK_S
        assert keys.callback("*", old) and not keys.callback("*", new)
    clock.now += CHECK_S
    assert not keys.callback("*", old) and keys.callback("*", new)


def test_a_folder_that_comes_later_is_read(folder: Path) -> None:
    clock = Clock()
    keys = ExecutorKeys(folder, clock)
    known = put(folder, "known")
    assert not keys.callback("*", known)
    clock.now += CHECK_S
    assert keys.callback("*", known)


# --- with sockets ---


@pytest.fixture
def context() -> Iterator[zmq.Context[Socket]]:
    with zmq.Context() as context:
        yield context


def dial(context: zmq.Context[Socket], address: str, server_key: bytes, keys: tuple[bytes, bytes]) -> Socket | None:
    """A connection under a key pair; None when it is refused."""
    dealer = context.socket(zmq.DEALER)
    dealer.linger, dealer.curve_serverkey = 0, server_key
    dealer.curve_publickey, dealer.curve_secretkey = keys
    monitor = dealer.get_monitor_socket(HANDSHAKE_ENDED)
    dealer.connect(address)
    assert monitor.poll(20_000)
    event = recv_monitor_message(monitor)["event"]
    dealer.disable_monitor()
    monitor.close(0)
    if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
        return dealer
    dealer.close()
    return None


def test_handshakes_follow_the_folder_and_standing_connections_stay(
    tmp_path: Path, folder: Path, context: zmq.Context[Socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_keys, "CHECK_S", 0.0)
    server_path, server_secret = create_key_pair(tmp_path, "scheduler")
    server_key, pair = zmq.auth.load_certificate(server_path)[0], zmq.curve_keypair()
    folder.mkdir()
    address = f"ipc://{tmp_path}/executors"
    settings = SchedulerSettings(executor_bind=address, curve_secret_key=server_secret, curve_client_keys=folder)
    checker, router = authenticator(context, settings), executor_socket(context, settings)
    assert checker is not None
    try:
        assert dial(context, address, server_key, pair) is None
        file = folder / "gpu-0.key"
        file.write_text(f'curve\n    public-key = "{pair[0].decode()}"\n')
        friend = dial(context, address, server_key, pair)
        assert friend is not None, "its key is known now"
        file.unlink()
        assert dial(context, address, server_key, pair) is None
        friend.send(b"still here")
        assert router.poll(20_000) and router.recv_multipart()[1] == b"still here"
        friend.close()
    finally:
        checker.stop()
        router.close(0)
