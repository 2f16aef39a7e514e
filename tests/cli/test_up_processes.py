"""The processes of `gilir up`: what is started again, and when; what signals do."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

from deploy.local import ROOT
from scheduler_svc.cli.up.child import LONGEST_DELAY_S, STABLE_S, Child
from scheduler_svc.cli.up.console import Console
from scheduler_svc.cli.up.fleet import Failed, Fleet

PATIENCE_S = 60.0


def test_one_that_keeps_dying_is_started_later_and_later() -> None:
    lines: list[str] = []
    child = Child("x", ["-S", "-c", "raise SystemExit('error: no luck')"], lambda name, line: lines.append(line))
    now, delays = 0.0, []
    child.start(now)
    for _ in range(9):
        assert child.process is not None
        child.process.wait()
        words = child.check(now)
        delays.append(0.0 if words.endswith("at once") else float(re.findall(r"in ([\d.]+) s$", words)[0]))
        assert child.check(now + delays[-1] - 0.01) == "" or not delays[-1]
        now += delays[-1]
        if child.process is None:
            assert child.check(now) == "x: started again"
    assert delays == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, LONGEST_DELAY_S, LONGEST_DELAY_S]
    assert child.process is not None
    child.process.wait()
    assert child.check(now + STABLE_S + 1).endswith("at once")  # it had lived long
    assert child.last_words() == ["error: no luck"] * len(child.tail) and "error: no luck" in lines


def test_what_cannot_be_started_again_now_is_later(monkeypatch: pytest.MonkeyPatch) -> None:
    child = Child("x", ["-S", "-c", ""], lambda name, line: None)
    child.start(0.0)
    assert child.process is not None and child.process.wait() == 0
    assert child.check(0.0) == "x: ended with status 0, is started again at once"

    def no_room(*_arguments: object, **_more: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    with monkeypatch.context() as full:
        full.setattr(subprocess, "Popen", no_room)
        assert child.check(0.0) == "x: cannot be started: Cannot allocate memory, is started again in 0.5 s"
    assert child.check(0.4) == "" and child.check(0.5) == "x: started again"
    child.process.wait()


def test_one_that_ends_before_all_are_ready_ends_the_start_with_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # these are the handlers of pytest's own process
    console = Console(["scheduler", "executor-0"], None)
    scheduler = Child("scheduler", ["-S", "-c", "import signal; signal.pause()"], console.write)
    executor = Child("executor-0", ["-S", "-c", "raise SystemExit('error: no such model')"], console.write)
    fleet = Fleet(scheduler, [executor], console, "http://127.0.0.1:1", 60.0)
    fleet.start()
    try:
        with pytest.raises(Failed) as failed:
            fleet.wait_ready()
    finally:
        fleet.stop()
    assert failed.value.status == 1 and failed.value.args == ("executor-0: no such model",)
    assert not scheduler.is_running


def test_it_ends_with_the_thread_that_started_it() -> None:
    code = (
        "import time; from scheduler_svc.cli.up.child import Child\n"
        "child = Child('x', ['-S', '-c', 'import time; time.sleep(60)'], print)\n"
        "child.start(0.0); print(child.process.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + PATIENCE_S
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.02)


FLEET = """
import signal, sys
from scheduler_svc.cli.up.child import Child
from scheduler_svc.cli.up.console import Console
from scheduler_svc.cli.up.fleet import Fleet

stubborn = '''
import os, signal
left = int(__import__("sys").argv[1])
def handle(*_):
    global left
    left -= 1
    print("asked", flush=True)
    if not left:
        os._exit(0)  # at once: while an interpreter ends, the next signal would kill it
signal.signal(signal.SIGTERM, handle)
print("runs", flush=True)
while True:
    signal.pause()
'''
console = Console(["scheduler", "executor"], None)
scheduler = Child("scheduler", ["-S", "-c", stubborn, sys.argv[1]], console.write)
executor = Child("executor", ["-S", "-c", stubborn, sys.argv[2]], console.write)
fleet = Fleet(scheduler, [executor], console, "http://127.0.0.1:1", 60.0)
fleet.start()
fleet.watch()
fleet.stop()
print(scheduler.process.returncode, executor.process.returncode)
"""


@pytest.mark.parametrize(
    ("asks", "num_signals", "statuses"), [((1, 1), 1, "0 0"), ((2, 1), 2, "0 0"), ((99, 99), 3, "-9 -9")]
)
def test_a_second_signal_does_not_wait_and_a_third_kills(
    asks: tuple[int, int], num_signals: int, statuses: str
) -> None:
    command = [sys.executable, "-c", FLEET, *map(str, asks)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert {process.stderr.readline() for _ in asks} == {"scheduler | runs\n", "executor  | runs\n"}
        for _ in range(num_signals):
            process.send_signal(signal.SIGTERM)
            if process.poll() is None:
                process.stderr.readline()  # the scheduler was asked
        assert process.wait(PATIENCE_S) == 0
        assert process.stdout.read().splitlines()[-1] == statuses
