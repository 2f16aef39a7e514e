"""What all commands have in common: help with examples, plain errors, no tracebacks."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version

import pytest

from scheduler_svc.cli import entry, main
from scheduler_svc.cli.commands import COMMANDS, GROUPS
from scheduler_svc.cli.connection import base_url
from tests.cli.stub_server import Stub


def test_the_help_has_all_commands_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for title, commands in GROUPS.items():
        place = lines.index(f"{title}:")
        assert [line.split()[0] for line in lines[place + 1 : place + 1 + len(commands)]] == list(commands)
    assert max(map(len, lines)) < 120


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_examples_that_it_understands(name: str) -> None:
    made = import_module(COMMANDS[name].module).parser(f"gilir {name}")
    assert made.format_help().count("examples:") == 1
    examples = [line.split("gilir ", 1)[1] for line in made.epilog.splitlines() if f"gilir {name}" in line]
    assert examples
    for example in examples:
        words = example.split("   ")[0].split(" | ")[0].split(" > ")[0].split(')"')[0]
        made.parse_args(shlex.split(words)[1:])


def test_a_command_that_there_is_not_is_a_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serv"]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("gilir: there is no command 'serv'; there are up, ")
    assert main(["serve", "m"]) == 2
    assert capsys.readouterr().err == "gilir: there is no command 'serve'; it is `gilir up`\n"


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"gilir {version('gilir')}\n"


def test_without_the_extra_the_command_says_what_is_missing(
    fails: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name="rich")

    monkeypatch.setattr(entry, "import_module", missing)
    assert fails("chat") == "gilir chat needs rich: pip install -e '.[cli]' in Gilir's folder"


def test_ctrl_c_ends_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    class Interrupting:
        @staticmethod
        def main(_arguments: list[str], _prog: str) -> int:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entry, "import_module", lambda _: Interrupting)
        assert main(["top"]) == 130
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("command", [["chat", "hi"], ["bench"], ["top", "--once"]])
def test_what_is_wrong_with_a_server_is_said_in_one_line(
    command: list[str], stub: Stub, fails: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = [*command, "--url"]
    assert fails(*ask, "127.0.0.1:1") == "no server answers at http://127.0.0.1:1: start one with `gilir up`"
    assert "is no URL" in fails(*ask, "ftp://there")
    for route in ("GET /v1/models", "GET /dashboard/events"):
        stub.refuse(route, 401, "no")
    assert "asks for an API key: set GILIR_API_KEY" in fails(*ask, stub.url)
    monkeypatch.setenv("GILIR_API_KEY", "wrong")
    assert fails(*ask, stub.url) == f"{stub.url} does not take this API key"
    assert stub.headers[-1]["authorization"] == "Bearer wrong"
    for route in ("GET /v1/models", "GET /dashboard/events"):
        stub.refuse(route, 503, "the scheduler\ndoes not answer")
    assert fails(*ask, stub.url) == "the scheduler does not answer"


@pytest.mark.parametrize("command", [["chat", "hi"], ["bench"]])
def test_a_model_that_is_not_served_is_said_with_those_that_are(
    command: list[str], stub: Stub, fails: Callable[..., str]
) -> None:
    ask = [*command, "--url", stub.url]
    assert fails(*ask, "--model", "x") == f"there is no model 'x' at {stub.url}; there is m"
    stub.say("GET /v1/models", 200, {"data": []})
    assert "serves no model now" in fails(*ask)
    stub.say("GET /v1/models", 200, b"<html>")
    assert "does not answer in JSON" in fails(*ask)
    stub.say("GET /v1/models", 200, {"hello": "there"})
    assert "is it such a server?" in fails(*ask)


def test_urls_are_taken_as_users_of_other_clients_write_them() -> None:
    for text in ("http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/", "h:1", " h:1/v1"):
        assert base_url(text) == "http://h:1"
    assert base_url("https://h/openai/v1") == "https://h/openai"
