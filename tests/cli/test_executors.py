"""`gilir executors`: the list, and which question to the admin API each action becomes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scheduler_svc.cli import executors as module
from scheduler_svc.cli import main
from tests.cli.stub_server import Stub

LIST = "GET /admin/executors"
STATES = {"object": "list", "data": [{"name": "gpu/0", "state": "draining", "running": 3}]}


def account(name: str, state: str) -> dict[str, Any]:
    seats = {"seats": 8, "running": 2, "kv_blocks": 100, "kv_blocks_used": 25, "iterations": 5}
    return {"name": name, "state": state, "model": "m", **seats, "iteration_s": {"mean": 0.02}, "silent_s": 0.1}


def roster(*attached: dict[str, Any], paused: tuple[str, ...] = (), lost: tuple[Any, ...] = ()) -> dict[str, Any]:
    return {"data": list(attached), "paused": list(paused), "lost": list(lost)}


@pytest.fixture
def run(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    monkeypatch.setattr(module, "WAIT_S", 0.0)
    monkeypatch.setenv("COLUMNS", "100")
    return lambda *arguments: main(["executors", *arguments, "--admin-url", stub.url])


def test_the_list_tells_all_that_are_known(
    run: Callable[..., int], stub: Stub, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = {"name": "gpu-9", "reason": "its connection\nbroke", "ago_s": 7.0}
    stub.say(LIST, 200, roster(account("gpu-[0]", "attached"), paused=("gpu-8",), lost=(lost,)))
    assert run() == run("list") == 0
    lines = capsys.readouterr().out.splitlines()
    (attached,) = {line for line in lines if "gpu-[0]" in line}
    assert attached.split() == ["gpu-[0]", "attached", "m", "2/8", "25%", "20", "ms", "100", "ms", "ago"]
    text = "\n".join(lines)
    assert "paused, not attached" in text and "lost 7.0 s ago" in text
    stub.say(LIST, 200, roster())
    assert run() == 0 and "none is attached" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "route", "body"),
    [
        (["drain", "gpu/0"], "POST /admin/executors/gpu%2F0/drain", None),
        (["drain", "gpu/0", "--timeout-s", "3"], "POST /admin/executors/gpu%2F0/drain", {"timeout_s": 3.0}),
        (["pause", "gpu/0"], "POST /admin/executors/gpu%2F0/drain", None),
        (["resume", "gpu/0"], "POST /admin/executors/gpu%2F0/resume", None),
        (["release", "gpu/0"], "DELETE /admin/executors/gpu%2F0", None),
        (["pause", "--model", "org/m"], "POST /admin/models/org%2Fm/pause", None),
        (["resume", "--model", "org/m"], "POST /admin/models/org%2Fm/resume", None),
    ],
)
def test_each_action_asks_the_admin_api(
    arguments: list[str],
    route: str,
    body: Any,
    run: Callable[..., int],
    stub: Stub,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stub.say(route, 202, STATES)
    assert run(*arguments) == 0
    assert stub.asked == [(route, body)] and capsys.readouterr().out == "gpu/0: draining, 3 running\n"


@pytest.mark.parametrize(("action", "last"), [("drain", "paused"), ("release", "gone")])
def test_it_waits_until_the_executor_is_where_it_should_be(
    action: str, last: str, run: Callable[..., int], stub: Stub, capsys: pytest.CaptureFixture[str]
) -> None:
    for route in ("POST /admin/executors/gpu%2F0/drain", "DELETE /admin/executors/gpu%2F0"):
        stub.say(route, 202, STATES)
    states = iter(["draining", "draining", "paused"] if action == "drain" else ["leaving", ""])
    stub.replies[LIST] = lambda _: (200, roster(*(account("gpu/0", s) for s in [next(states)] if s)))
    assert run(action, "gpu/0", "--wait") == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"gpu/0: {last}" and next(states, None) is None


def test_one_that_is_resumed_meanwhile_ends_the_wait(
    stub: Stub, fails: Callable[..., str], run: Callable[..., int]
) -> None:
    stub.say("POST /admin/executors/gpu%2F0/drain", 202, STATES)
    stub.say(LIST, 200, roster(account("gpu/0", "attached")))
    assert "resumed or released it" in fails("executors", "drain", "gpu/0", "--wait", "--admin-url", stub.url)


def test_the_key_comes_from_a_file_or_the_environment(
    stub: Stub, tmp_path: Path, fails: Callable[..., str], run: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    stub.say(LIST, 200, roster())
    (tmp_path / "key").write_text("from-the-file\n")
    assert run("--admin-key-file", str(tmp_path / "key")) == 0
    assert stub.headers[-1]["authorization"] == "Bearer from-the-file"
    monkeypatch.setenv("GILIR_ADMIN_KEY", "from-the-environment")
    assert run() == 0 and stub.headers[-1]["authorization"] == "Bearer from-the-environment"
    assert fails("executors", "--admin-key-file", str(tmp_path / "no")).endswith("no: No such file or directory")


def test_what_cannot_be_is_said_in_one_line(stub: Stub, fails: Callable[..., str]) -> None:
    assert "start the scheduler with --admin-port" in fails("executors", "--admin-url", "127.0.0.1:1")
    stub.refuse("POST /admin/executors/x/resume", 404, "no executor named 'x' is attached")
    assert fails("executors", "resume", "x", "--admin-url", stub.url) == "no executor named 'x' is attached"


@pytest.mark.parametrize(
    "arguments",
    [["drain"], ["list", "x"], ["drain", "--model", "m"], ["pause", "x", "--model", "m"], ["resume", "x", "--wait"],
     ["pause", "x", "--timeout-s", "1"], ["drain", "x", "--watch"], ["explode", "x"]],
)  # fmt: skip
def test_a_usage_that_makes_no_sense_has_status_2(arguments: list[str], run: Callable[..., int]) -> None:
    with pytest.raises(SystemExit) as end:
        run(*arguments)
    assert end.value.code == 2
