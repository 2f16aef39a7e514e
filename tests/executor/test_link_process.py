"""The link in a process of its own: signals, refusal, keys."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq
from zmq.auth import create_certificates

from common.wire import Drain, Hello, Leaving, Refused, Result
from executor_svc.fake import FakeExecutor
from executor_svc.handover import TransferSocket, transfer_socket
from executor_svc.sockets import Dialing, is_local, read_key
from tests.executor.plans import decode_plan, new_sequence, prefill_plan
from tests.executor.scripted_scheduler import ScriptedScheduler


def attach(scheduler: ScriptedScheduler, fake: FakeExecutor, epoch: int = 1) -> None:
    times = len(fake.epochs)
    scheduler.welcome(epoch)
    fake.wait_attached(times + 1)


def serve_one(scheduler: ScriptedScheduler, epoch: int, iteration: int = 1) -> Result:
    """Admit a sequence into slot 0 of a fresh epoch and take its first token."""
    scheduler.send(prefill_plan(iteration, new_sequence(0, [5, 6, 7], [2]), epoch=epoch))
    return scheduler.receive(Result)


def _process(scheduler: ScriptedScheduler, *flags: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "executor_svc.fake", "--scheduler", scheduler.address, *flags]
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_leave_cleanly(scheduler: ScriptedScheduler, number: signal.Signals) -> None:
    process = _process(scheduler)
    scheduler.welcome(1)
    serve_one(scheduler, epoch=1)
    process.send_signal(number)
    assert scheduler.receive(Leaving).reason == number.name
    scheduler.send(decode_plan(2, 0))
    scheduler.receive(Result)
    scheduler.send(Drain(1))
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0 and b"Traceback" not in errors


SIGNALLED_ELSEWHERE = """
import signal, sys, threading
from executor_svc import fake

def end():
    sys.stdin.readline()
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

threading.Thread(target=end).start()
sys.exit(fake.main(sys.argv[1:]))
"""


def test_a_signal_that_does_not_interrupt_the_wait_is_heard(scheduler: ScriptedScheduler) -> None:
    """The wait of an attached executor has no limit, and a signal may come just before it, or to another thread."""
    command = [sys.executable, "-c", SIGNALLED_ELSEWHERE, "--scheduler", scheduler.address]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    scheduler.welcome(1)
    serve_one(scheduler, epoch=1)
    time.sleep(0.2)  # until it waits
    assert process.stdin is not None
    process.stdin.write(b"\n")
    process.stdin.flush()
    assert scheduler.receive(Leaving).reason == "SIGTERM"
    scheduler.send(Drain(1))
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0 and b"Traceback" not in errors


def test_the_second_signal_ends_at_once(scheduler: ScriptedScheduler) -> None:
    process = _process(scheduler, "--grace-s", "600")
    scheduler.welcome(1)
    serve_one(scheduler, epoch=1)
    process.send_signal(signal.SIGTERM)
    scheduler.receive(Leaving)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM


def test_a_stopped_process_that_wakes_up_finds_its_epoch_gone(scheduler: ScriptedScheduler) -> None:
    """SIGSTOP, the epoch ends meanwhile, SIGCONT: no result of the old epoch is fit to be used."""
    process = _process(scheduler, "--scheduler-timeout-s", "1")
    try:
        scheduler.welcome(1)
        serve_one(scheduler, epoch=1)
        os.kill(process.pid, signal.SIGSTOP)
        scheduler.known_epochs.clear()
        os.kill(process.pid, signal.SIGCONT)
        scheduler.welcome(2)
        assert serve_one(scheduler, epoch=2).epoch == 2
    finally:
        process.kill()
        process.communicate(timeout=60)


def test_a_refusal_is_one_plain_line(scheduler: ScriptedScheduler) -> None:
    process = _process(scheduler, "--log-level", "error")
    scheduler.receive(Hello)
    scheduler.send(Refused("block size 16 does not match", retry=False))
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors.decode() == "error: the scheduler refused this executor: block size 16 does not match\n"
    assert output == b""


def dial_scheduler(address: str, context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    return Dialing(address, timeout_s=0.3).open(context)


def dial_executor(address: str, context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    return TransferSocket("ipc://unused").dial(context, address, b"", 1024)


@pytest.mark.parametrize("dial", [dial_scheduler, dial_executor])
def test_a_far_side_that_vanishes_in_mid_handshake_is_dialled_anew(
    dial: Callable[[str, zmq.Context[zmq.Socket[bytes]]], zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network that breaks just then leaves a connection on which nothing comes, and nobody says so."""
    monkeypatch.setattr(transfer_socket, "SILENCE_MS", 300)
    with socket.create_server(("127.0.0.1", 0)) as silent, zmq.Context() as context:
        silent.settimeout(8)
        dealer = dial(f"tcp://127.0.0.1:{silent.getsockname()[1]}", context)
        try:
            first, second = silent.accept()[0], silent.accept()[0]
            first.close(), second.close()
        finally:
            dealer.close(linger=0)


def test_curve_keys(tmp_path: Path) -> None:
    server_public, server_secret = zmq.curve_keypair()
    _, own_file = create_certificates(tmp_path, "executor")
    (tmp_path / "server.key").write_text(server_public.decode() + "\n")
    server_key = read_key(str(tmp_path / "server.key"), "public")
    assert server_key == server_public
    secured = ScriptedScheduler(curve_secret_key=server_secret)
    own_key = read_key(own_file, "secret")
    with FakeExecutor(secured.address, server_key=server_key, secret_key=own_key) as fake:
        attach(secured, fake)
        assert len(serve_one(secured, epoch=1).tokens) == 1
    with FakeExecutor(secured.address), pytest.raises(TimeoutError):
        secured.receive_any(0.3)
    secured.close()


def test_bad_key_files_are_told(tmp_path: Path) -> None:
    (tmp_path / "short.key").write_text("abc")
    with pytest.raises(ValueError, match="holds no public key of 40 characters"):
        read_key(str(tmp_path / "short.key"), "public")


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("ipc:///tmp/x.sock", True),
        ("tcp://127.0.0.1:1", True),
        ("tcp://127.9.9.9:1", True),
        ("tcp://[::1]:1", True),
        ("tcp://localhost:1", True),
        ("tcp://10.0.0.1:1", False),
        ("tcp://scheduler:1", False),
        ("tcp://0.0.0.0:1", False),
    ],
)
def test_is_local(address: str, local: bool) -> None:
    assert is_local(address) is local
