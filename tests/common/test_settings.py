"""Settings of a service: flags over environment over file over defaults, and plain lines for mistakes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar

import pytest
from pydantic import Field, SecretStr, model_validator

from common.settings import CONFIG_VARIABLE, ServiceSettings


class Settings(ServiceSettings):
    table: ClassVar[str] = "service"

    port: int = Field(8000, ge=0, le=65535)
    prefix_caching: bool = True
    model_path: Path | None = None
    access_key: str = ""

    @model_validator(mode="after")
    def _not_both(self) -> Settings:
        if self.port == 13 and self.prefix_caching:
            raise ValueError("port 13 goes without prefix caching")
        return self


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("GILIR_")]:
        monkeypatch.delenv(name)


def read(*arguments: str) -> Settings:
    return Settings.from_command_line(list(arguments), prog="service")


def mistakes(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """The lines on stderr of a command line that is refused with status 2."""
    with pytest.raises(SystemExit) as end:
        read(*arguments)
    assert end.value.code == 2
    out, err = capsys.readouterr()
    assert not out and "Traceback" not in err
    return err.splitlines()


def config(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = folder / "gilir.toml"
    path.write_text(text)
    monkeypatch.setenv(CONFIG_VARIABLE, str(path))
    return path


def test_defaults() -> None:
    settings = read()
    assert settings.port == 8000 and settings.prefix_caching and settings.model_path is None
    assert settings.log_format == "console" and settings.log_level == "info"


def test_a_flag_wins_over_the_environment_and_that_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config(tmp_path, '[service]\nport = 1\nlog-format = "json"\nprefix_caching = false\n', monkeypatch)
    assert read().port == 1
    monkeypatch.setenv("GILIR_PORT", "2")
    assert read().port == 2
    settings = read("--port", "3")
    assert settings.port == 3 and settings.log_format == "json" and not settings.prefix_caching
    assert read("--prefix-caching", "--model-path", "/m").model_path == Path("/m")


def test_each_service_reads_its_own_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config(tmp_path, "[executor]\nport = 1\nunknown = 2\n[service]\n", monkeypatch)
    assert read().port == 8000


def test_an_empty_variable_is_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GILIR_PORT", "")
    monkeypatch.setenv(CONFIG_VARIABLE, "")
    assert read().port == 8000


def test_variables_of_others_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GILIR_NO_SUCH_SETTING", "1")
    monkeypatch.setenv("PORT", "7")
    assert read().port == 8000


def test_one_plain_line_for_each_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    lines = mistakes(capsys, "--port", "many", "--log-level", "loud", "--log-format", "json")
    assert len(lines) == 2
    assert any(line.startswith("error: --port: ") and "'many'" in line for line in lines)
    assert any(line.startswith("error: --log-level: ") and "'loud'" in line for line in lines)
    (line,) = mistakes(capsys, "--port", "65536")
    assert line.startswith("error: --port: ")


def test_a_mistake_between_settings_tells_no_other_value(capsys: pytest.CaptureFixture[str]) -> None:
    assert mistakes(capsys, "--port", "13", "--access-key", "hush") == ["error: port 13 goes without prefix caching"]


class Guarded(ServiceSettings):
    table: ClassVar[str] = "service"

    access_key: SecretStr | None = Field(None, min_length=9)


def test_a_secret_is_not_shown_not_even_where_it_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for arguments, text in ((["--access-key", "hush"], ""), ([], "access-key = 4711")):
        path = config(tmp_path, f"[service]\n{text}\n", monkeypatch)
        where = f"{path}: [service] " if text else "--"
        with pytest.raises(SystemExit):
            Guarded.from_command_line(arguments, prog="service")
        err = capsys.readouterr().err
        assert err.startswith(f"error: {where}access-key: ") and "hush" not in err and "4711" not in err
    assert "long enough" not in repr(Guarded.from_command_line(["--access-key", "long enough"], prog="service"))


def test_a_wrong_variable_names_the_setting(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GILIR_PORT", "x")
    (line,) = mistakes(capsys)
    assert line.startswith("error: --port: ")


@pytest.mark.parametrize("arguments", [["--no-such-flag"], ["--port"], ["extra"]])
def test_a_wrong_command_line_ends_with_one_error_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert sum("error: " in line for line in mistakes(capsys, *arguments)) == 1


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("[service]\nport = 'x'\n", "error: {path}: [service] port: "),
        ("[service]\nno_such = 1\n", "error: {path}: [service] no-such: there is no such setting"),
        ("[executr]\nport = 1\n", "error: {path}: there is no table [executr], only scheduler, "),
        ("service = 5\n", "error: {path}: service must be a table"),
        ("[service\n", "error: {path}: "),
        ("port = \xff\n", "error: {path}: "),
    ],
)
def test_a_wrong_file_is_told(
    text: str, start: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = config(tmp_path, "", monkeypatch)
    path.write_bytes(text.encode("latin-1"))
    (line,) = mistakes(capsys)
    assert line.startswith(start.format(path=path))


def test_a_file_that_is_not_there_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONFIG_VARIABLE, "/no/such/file.toml")
    (line,) = mistakes(capsys)
    assert CONFIG_VARIABLE in line and "/no/such/file.toml" in line


def test_help_ends_with_success(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        read("--help")
    assert end.value.code == 0 and "--prefix-caching" in capsys.readouterr().out
