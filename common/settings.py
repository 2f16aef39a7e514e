"""Settings of a service: command-line flags over `GILIR_…` environment variables over a TOML file over defaults."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, get_args

from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

CONFIG_VARIABLE = "GILIR_CONFIG"
"""Names a TOML file; each service reads the table that carries its name."""


class ServiceSettings(BaseSettings):
    """Base of both services' settings. A field `max_num_seqs` is `--max-num-seqs` and `GILIR_MAX_NUM_SEQS`."""

    model_config = SettingsConfigDict(
        env_prefix="GILIR_",
        env_ignore_empty=True,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        extra="forbid",
    )
    table: ClassVar[str] = ""
    """The table of the TOML file that this service reads."""

    log_format: Literal["console", "json"] = Field("console", description="log lines for people or for machines")
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        sources: list[PydanticBaseSettingsSource] = [init_settings, env_settings]
        path = os.environ.get(CONFIG_VARIABLE)
        if path:
            sources.append(_Table(settings_cls, path, cls.table))
        return tuple(sources)

    @classmethod
    def from_command_line(cls, arguments: list[str] | None = None, prog: str | None = None) -> Self:
        """Read all sources. Exits with status 2 and one plain line per mistake."""
        try:
            source: CliSettingsSource[Any] = CliSettingsSource(
                cls, cli_parse_args=sys.argv[1:] if arguments is None else arguments, cli_prog_name=prog
            )
            return cls(_cli_settings_source=source)  # type: ignore[call-arg]
        except ValidationError as error:
            for item in error.errors():
                text = item["msg"].removeprefix("Value error, ")
                name = "-".join(str(part) for part in item["loc"]).replace("_", "-")
                if item["type"] == "extra_forbidden":  # flags that there are not have been refused before
                    where = f"{os.environ.get(CONFIG_VARIABLE)}: [{cls.table}]"
                    print(f"error: {where} {name}: there is no such setting", file=sys.stderr)
                    continue
                # What does not hold between settings has no name, and its input is all of them.
                given = f" (got {item['input']!r})" if name and not cls.is_secret(item["loc"][0]) else ""
                where = f"{cls._in_file(item['loc'][0], item['input'])}{name}: " if name else ""
                print(f"error: {where}{text}{given}", file=sys.stderr)
        except (OSError, ValueError) as error:
            print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2)

    @classmethod
    def _in_file(cls, name: int | str, value: Any) -> str:
        """What stands before the name of a setting: the file's table where the value comes from there, else dashes."""
        path = os.environ.get(CONFIG_VARIABLE)
        table = _Table(cls, path, cls.table).toml_data if path else {}
        is_from_file = name in table and table[str(name)] == value
        return f"{path}: [{cls.table}] " if is_from_file else "--"

    @classmethod
    def is_secret(cls, name: int | str) -> bool:
        """Whether a field's value must not be shown."""
        field = cls.model_fields.get(str(name))
        return field is not None and SecretStr in (field.annotation, *get_args(field.annotation))


TABLES = ("scheduler", "frontend", "executor", "admin", "up", "fake")
"""Those that a TOML file may have, one for each kind of service, and that of `gilir up`."""


class _Table(TomlConfigSettingsSource):
    """One table of the TOML file."""

    def __init__(self, settings_cls: type[BaseSettings], path: str, table: str) -> None:
        self._table = table
        if not Path(path).is_file():
            raise ValueError(f"{CONFIG_VARIABLE}: there is no file {path}")
        super().__init__(settings_cls, path)

    def _read_file(self, file_path: Any) -> dict[str, Any]:
        try:
            tables = super()._read_file(file_path)
        except ValueError as error:
            raise ValueError(f"{file_path}: {error}") from error
        unknown = next((name for name in tables if name not in (self._table, *TABLES)), None)
        if unknown is not None:
            raise ValueError(f"{file_path}: there is no table [{unknown}], only {', '.join(TABLES[:5])}")
        table = tables.get(self._table, {})
        if not isinstance(table, dict):
            raise ValueError(f"{file_path}: {self._table} must be a table")
        return {key.replace("-", "_"): value for key, value in table.items()}
