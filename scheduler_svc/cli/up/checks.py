"""What is wrong with the settings of the services, told before any of them starts."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from typing import TypeVar

from common.settings import ServiceSettings
from scheduler_svc.admin.settings import AdminSettings
from scheduler_svc.frontend.settings import FrontendSettings
from scheduler_svc.settings import SchedulerSettings

Settings = TypeVar("Settings", bound=ServiceSettings)
CHECK_EXECUTORS = """import json, sys
from executor_svc.settings import ExecutorSettings
from scheduler_svc.cli.up.checks import check
print(json.dumps([check(ExecutorSettings, flags)[1] for flags in json.loads(sys.argv[1])]))"""
"""In a process of its own: nothing of the executors is imported here."""


def check(settings: type[Settings], flags: list[str]) -> tuple[Settings | None, list[str]]:
    """The settings with these flags, and what is wrong: lines that begin with the flag, or with its place in the file.

    None where they are wrong. A flag that there is not hides no other mistake.
    """
    known = {name.replace("_", "-") for name in settings.model_fields}
    wrong, kept = [], []
    for flag, *values in _grouped(flags):
        if flag.removeprefix("--") in known or flag.removeprefix("--no-") in known:
            kept += [flag, *values]
        else:
            wrong.append(f"{flag}: there is no such setting")
    found = None
    with contextlib.suppress(SystemExit), contextlib.redirect_stderr(io.StringIO()) as stderr:
        found = settings.from_command_line(kept, prog="gilir up")
    # argparse's own line stands behind a long one of the usage.
    wrong += [line.partition("error: ")[2] for line in stderr.getvalue().splitlines() if "error: " in line]
    return (None if wrong else found), wrong


def _grouped(flags: list[str]) -> list[list[str]]:
    """Each flag with its values."""
    groups: list[list[str]] = []
    for part in flags:
        if part.startswith("--"):
            groups.append([part])
        else:
            groups[-1].append(part)
    return groups


def check_scheduler(flags: list[str], places: dict[str, str]) -> tuple[SchedulerSettings | None, list[str]]:
    """Of the scheduler and of what it starts. places: what to call a flag that was given in another form."""
    found, wrong = check(SchedulerSettings, flags)
    # They inherit a socket: who may listen is judged with the scheduler's settings.
    child_flags = ["--core", "ipc://core", "--fd", "0"]
    children_wrong = [*check(FrontendSettings, child_flags)[1], *check(AdminSettings, child_flags)[1]]
    return found, [_placed(line, places) for line in wrong] + children_wrong


def check_executors(flags: list[list[str]], places: list[dict[str, str]]) -> list[str]:
    """What is wrong with the settings of executors. flags, places: for each of them, as above."""
    command = [sys.executable, "-c", CHECK_EXECUTORS, json.dumps(flags)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        return done.stderr.splitlines()[-1:]
    told = json.loads(done.stdout)
    return [_placed(line, places[i]) for i in range(len(flags)) for line in told[i]]


def _placed(line: str, places: dict[str, str]) -> str:
    flag, colon, text = line.partition(": ")
    return f"{places.get(flag, flag)}{colon}{text}"
