"""The commands of `gilir`, in front of a server that says what a test tells it to."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from scheduler_svc.cli import main
from tests.cli.stub_server import Stub, run_stub


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("GILIR_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def stub() -> Iterator[Stub]:
    with run_stub() as stub:
        yield stub


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command that fails with status 1; returns the one line that it says."""

    def run(*arguments: str) -> str:
        assert main(list(arguments)) == 1
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and err.startswith("error: "), err
        return err.removeprefix("error: ").rstrip("\n")

    return run
