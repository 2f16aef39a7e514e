"""The scheduler's settings that belong together: whom the REST API is open to, and what hangs on keys."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scheduler_svc.__main__ import main
from scheduler_svc.batch_runner.settings import RunnerSettings
from scheduler_svc.frontend.settings import FrontendSettings
from scheduler_svc.settings import SchedulerSettings

KEY = "gk-hush-hush"


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("GILIR_")]:
        monkeypatch.delenv(name)


def read(*flags: str) -> SchedulerSettings:
    return SchedulerSettings.from_command_line(list(flags), prog="scheduler")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.org"])
def test_beyond_loopback_with_keys_or_the_word_that_none_are_wanted(
    host: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit) as end:
        read("--host", host)
    err = capsys.readouterr().err
    assert end.value.code == 2 and err.startswith(f"error: host {host} opens the REST API") and err.count("\n") == 1
    for flags in (["--api-key", KEY], ["--api-keys", "keys.jsonl"], ["--allow-no-api-keys"]):
        assert read("--host", host, *flags).host == host
    monkeypatch.setenv("GILIR_API_KEY", KEY)
    assert read("--host", host).api_key is not None


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_loopback_needs_no_keys(host: str) -> None:
    assert read("--host", host).api_key is None


def test_with_keys_tenants_share_no_prefixes_unless_told() -> None:
    assert not read().scheduler_config().isolate_tenants
    for flags in (["--api-key", KEY], ["--api-keys", "keys.jsonl"]):
        assert read(*flags).scheduler_config().isolate_tenants
        assert not read(*flags, "--no-isolate-tenants").scheduler_config().isolate_tenants
    assert read("--isolate-tenants").scheduler_config().isolate_tenants


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--api-key", KEY + " two words"], "api-key must be printable ASCII"),
        (["--api-key", KEY + "\a"], "api-key must be printable ASCII"),
        (["--max-bodies-mb", "1"], "max-bodies-mb must be at least max-body-mb"),
    ],
)
def test_mistakes_are_told_without_the_key(flags: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read(*flags)
    err = capsys.readouterr().err
    assert told in err and KEY not in err and err.count("\n") == 1


def test_a_key_does_not_show_in_the_settings() -> None:
    assert KEY not in repr(read("--api-key", KEY)) and KEY not in str(read("--api-key", KEY).model_dump())


def test_a_key_file_that_cannot_be_used_ends_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken"
    broken.write_text(f"{KEY}\n")
    for path, told in ((tmp_path / "none", "No such file or directory"), (broken, "line 1: is no JSON object")):
        monkeypatch.setattr("sys.argv", ["scheduler", "--port", "0", "--api-keys", str(path)])
        assert main() == 1
        err = capsys.readouterr().err
        assert err.startswith(f"error: {path}") and told in err and KEY not in err and err.count("\n") == 1


def test_the_batch_runner_opens_no_door(monkeypatch: pytest.MonkeyPatch) -> None:
    """It shares the scheduler's environment, not its flags: `--allow-no-api-keys` may be one."""
    monkeypatch.setenv("GILIR_HOST", "0.0.0.0")
    assert RunnerSettings.from_command_line(["--core", "ipc://none"]).host == "0.0.0.0"
    with pytest.raises(SystemExit):
        FrontendSettings.from_command_line(["--core", "ipc://none"])


def test_what_only_frontends_know_comes_by_the_environment_or_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler takes no such flag, and is not disturbed by what is meant for its children."""
    file = tmp_path / "gilir.toml"
    file.write_text("[frontend]\ntokenizer_threads = 5\nstalled_client_s = 7\n")
    monkeypatch.setenv("GILIR_CONFIG", str(file))
    monkeypatch.setenv("GILIR_TOKENIZER_THREADS", "3")
    for kind in (FrontendSettings, RunnerSettings):
        settings = kind.from_command_line(["--core", "ipc://none"])
        assert (settings.tokenizer_threads, settings.stalled_client_s) == (3, 7)
    assert read().frontends == 1
    with pytest.raises(SystemExit):
        read("--tokenizer-threads", "3")
