"""The supervisor ends children that hang, whichever socket they speak on, and tells them their settings."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from scheduler_svc.admin.settings import AdminSettings
from scheduler_svc.batch_runner.settings import RunnerSettings
from scheduler_svc.child_settings import DECIDED, EACH_ITS_OWN, EITHER, FRONTENDS_OWN
from scheduler_svc.frontend.settings import FrontendSettings
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.supervisor import Supervisor


@pytest.mark.parametrize("name", ["frontend-0", "admin"])
def test_a_child_that_falls_silent_is_killed_and_started_anew(name: str) -> None:
    settings = SchedulerSettings(frontends=1, frontend_timeout_s=5.0)
    with socket.socket() as listener:
        supervisor = Supervisor(settings, listener, "ipc:///nowhere")
        supervisor.add("admin", None, "scheduler_svc.admin")
        for child in supervisor._children:
            child.command = ["/bin/sleep", "60"]
        supervisor.start(0.0)
        try:
            [child] = [child for child in supervisor._children if child.name == name]
            first = child.process
            assert first is not None
            for i in range(8):
                assert supervisor.check(float(i)) == ([], None), "one that has not spoken yet may be loading"
            supervisor.heard(name, 8.0)
            supervisor.excuse(100.0, 108.0)
            for i in range(108, 114):
                assert supervisor.check(float(i)) == ([], None), "the core stood still"
            dead = supervisor.check(113.5)[0]  # killed; it may have been reaped as well
            first.wait(60)
            assert (dead or supervisor.check(114.0)[0]) == [name]
            assert child.process is not first and child.process is not None
        finally:
            supervisor.kill()


@pytest.mark.parametrize("allowed", [False, True])
def test_frontends_hear_whether_they_may_do_without_keys(allowed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the environment says, which they share: the scheduler may have been told otherwise by a flag."""
    monkeypatch.setenv("GILIR_ALLOW_NO_API_KEYS", str(not allowed))
    with socket.socket() as listener:
        supervisor = Supervisor(SchedulerSettings(allow_no_api_keys=allowed), listener, "ipc:///nowhere")
    [child] = supervisor._children
    settings = FrontendSettings.from_command_line(child.command[3:])
    assert settings.allow_no_api_keys == allowed


def test_the_limits_of_batches_reach_the_processes_that_hold_them(tmp_path: Path) -> None:
    settings = SchedulerSettings(
        batch_dir=tmp_path, batch_max_file_mb=3, batch_max_tenant_mb=4, batch_max_in_flight=5, batch_model_wait_s=6
    )
    with socket.socket() as listener:
        supervisor = Supervisor(settings, listener, "ipc:///nowhere")
    flags = {child.name: child.command[child.command.index("-m") + 2 :] for child in supervisor._children}
    frontend = FrontendSettings.from_command_line(flags["frontend-0"])
    assert (frontend.batch_dir, frontend.batch_max_file_mb, frontend.batch_max_tenant_mb) == (tmp_path, 3, 4)
    runner = RunnerSettings.from_command_line(flags["batch-runner"])
    assert (runner.batch_dir, runner.batch_max_in_flight, runner.batch_model_wait_s) == (tmp_path, 5, 6)


def test_the_frontends_own_table_holds_unless_the_scheduler_was_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for field in FRONTENDS_OWN:
        ours, theirs = SchedulerSettings.model_fields[field].default, FrontendSettings.model_fields[field].default
        assert ours == theirs, f"{field}: told by nobody, it is what the scheduler's help says"
    config = tmp_path / "gilir.toml"
    config.write_text("[frontend]\nresume_hold_s = 60\nmax_body_mb = 7\n")
    monkeypatch.setenv("GILIR_CONFIG", str(config))
    settings = SchedulerSettings.from_command_line(["--max-body-mb", "9"])
    with socket.socket() as listener:
        supervisor = Supervisor(settings, listener, "ipc:///nowhere")
    [child] = supervisor._children
    frontend = FrontendSettings.from_command_line(child.command[3:])
    assert (frontend.resume_hold_s, frontend.max_body_mb) == (60, 9)


def test_what_children_are_told_is_known_to_the_check_of_the_file(tmp_path: Path) -> None:
    """Every flag of a child, and what its environment brings, stands in `child_settings`; nothing else does."""
    values: dict[str, Any] = {name: getattr(SchedulerSettings(), name) for name in FRONTENDS_OWN}
    values |= {"batch_dir": tmp_path, "api_keys": tmp_path, "api_key": "k", "batch_database": "postgresql://x"}
    with socket.socket() as listener:
        supervisor = Supervisor(SchedulerSettings(**values), listener, "ipc:///nowhere")
        supervisor.add("admin", listener, "scheduler_svc.admin", "--core", "ipc:///nowhere", "--key-file", "k")
    environment = supervisor._environment().keys() - os.environ.keys()
    brought = {name.removeprefix("GILIR_").lower() for name in environment}
    told: dict[str, set[str]] = {}
    for child in supervisor._children:
        flags = (part for part in child.command if part.startswith("--"))
        told[child.name] = {flag.removeprefix("--no-").removeprefix("--").replace("-", "_") for flag in flags}
    known = {table: {*EACH_ITS_OWN, *DECIDED[table], *EITHER[table]} for table in DECIDED}
    assert known["frontend"] - {"host", "port"} == told["frontend-0"] | brought
    assert known["admin"] - {"name"} == told["admin"]
    assert known["frontend"] <= FrontendSettings.model_fields.keys()
    assert known["admin"] - {"name"} <= AdminSettings.model_fields.keys()
    assert {*DECIDED["frontend"], *EITHER["admin"].values()} <= SchedulerSettings.model_fields.keys()
    told_to_runner = told["batch-runner"] - {"batch_max_in_flight", "batch_model_wait_s"}
    assert told_to_runner == told["frontend-0"] - {"fd"}


def test_what_cannot_be_started_is_tried_later_and_later() -> None:
    with socket.socket() as listener:
        supervisor = Supervisor(SchedulerSettings(frontends=1), listener, "ipc:///nowhere")
    [child] = supervisor._children
    child.command = ["/no/such/program"]
    supervisor.start(100.0)
    now, waits = 100.0, []
    for _ in range(7):
        dead, due = supervisor.check(now)
        assert not dead and due is not None
        waits.append(round(due, 3))
        now += due
    assert waits == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


@pytest.mark.parametrize("told", [{}, {"tool_call_parser": "mistral", "reasoning_parser": "think"}], ids=["no", "yes"])
def test_how_answers_are_read_reaches_the_processes_that_read_them(
    told: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the scheduler is told goes before the frontends' own table, which holds otherwise."""
    config = tmp_path / "gilir.toml"
    config.write_text('[frontend]\ntool_call_parser = "hermes"\n')
    monkeypatch.setenv("GILIR_CONFIG", str(config))
    with socket.socket() as listener:
        supervisor = Supervisor(SchedulerSettings(**told), listener, "ipc:///nowhere")
    [child] = supervisor._children
    frontend = FrontendSettings.from_command_line(child.command[3:])
    wanted = ("mistral", "think") if told else ("hermes", "auto")
    assert (frontend.tool_call_parser, frontend.reasoning_parser) == wanted
