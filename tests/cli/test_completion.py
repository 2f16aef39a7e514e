"""Completion: the scripts are sound, and a real shell gets the words that may follow."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.local import ROOT
from scheduler_svc.cli import main
from scheduler_svc.cli.commands import COMMANDS
from tests.cli.in_terminal import InTerminal


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_sound(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = script(shell, capsys)
    assert "gilir" in text
    # zsh's script is also one of bash; fish's is not.
    checker = shell if shutil.which(shell) else "bash" if shell == "zsh" else None
    if checker is not None:
        checked = subprocess.run([checker, "-n"], input=text, text=True, capture_output=True)
        assert checked.returncode == 0, checked.stderr


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A PATH with `gilir` on it."""
    program = tmp_path / "gilir"
    program.write_text(f'#!/bin/sh\ncd {ROOT} && exec {sys.executable} -m scheduler_svc.cli "$@"\n')
    program.chmod(0o755)
    return f"{tmp_path}:/usr/bin:/bin"


def words(line: str, path: str, text: str) -> list[str]:
    """What bash would offer behind this line."""
    asked = f"""{text}
COMP_LINE={line!r} COMP_POINT={len(line)} COMP_TYPE=9 COMP_WORDBREAKS=$' \\t\\n"=:'
_python_argcomplete gilir
printf '%s\\n' "${{COMPREPLY[@]}}" """
    done = subprocess.run(["bash", "-c", asked], env={"PATH": path}, text=True, capture_output=True, timeout=60)
    return [word.strip() for word in done.stdout.split("\n") if word.strip()]


def test_bash_gets_commands_actions_flags_and_choices(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = script("bash", capsys)
    assert sorted(words("gilir ", path, text)) == sorted(COMMANDS)
    assert set(words("gilir executors re", path, text)) == {"resume", "release"}
    assert "--api-key" in words("gilir chat --a", path, text)
    assert set(words("gilir bench --api ", path, text)) == {"chat", "completions"}


def test_tab_completes_in_a_real_bash(path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rc").write_text(script("bash", capsys) + "\nPS1='ready> '\n")
    environment = {"PATH": path, "HISTFILE": ""}
    with InTerminal(["bash", "--noprofile", "--rcfile", str(tmp_path / "rc"), "-i"], environment) as terminal:
        terminal.wait_for("ready> ")
        terminal.press("gilir exec\t")
        terminal.wait_for("executors ")
        terminal.press("dr\t")
        terminal.wait_for("drain ")
