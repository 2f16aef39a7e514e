"""What `gilir up` is to run: one TOML file, with the command line over it."""

from __future__ import annotations

import os
import re
import tomllib
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from common.settings import CONFIG_VARIABLE
from scheduler_svc.child_settings import misplaced, underscored
from scheduler_svc.cli.up.checks import check_executors, check_scheduler
from scheduler_svc.cli.up.devices import spread
from scheduler_svc.settings import SchedulerSettings

TABLE = "up"
FIELDS = ("executors", "logs", "executor")
MAX_EXECUTORS = 64
SCHEDULER = "scheduler"
"""The name of its process, which no executor may have."""
HOLD_S = 300.0
"""For the scheduler's `hold_s`: an executor that ends is always started again, and may load a large model."""
NAME = re.compile(r"[A-Za-z0-9_:-][A-Za-z0-9_.:-]{0,99}")
"""Of an executor: its log has it as the file's name."""


class Mistakes(Exception):
    """What is wrong with a configuration; its arguments are plain lines, one for each mistake."""


@dataclass(frozen=True, slots=True)
class UpConfig:
    """scheduler_flags, executors: for the command lines of the processes, the latter by name."""

    settings: SchedulerSettings
    scheduler_flags: tuple[str, ...]
    executors: dict[str, tuple[str, ...]]
    logs: Path | None
    """Folder of the logs; None: they go to the console."""


@dataclass(slots=True)
class Overrides:
    """What the command line says; None where it says nothing."""

    config: Path | None = None
    host: str | None = None
    port: int | None = None
    admin_port: int | None = None
    frontends: int | None = None
    executors: int | None = None
    model: str | None = None
    logs: Path | None = None
    sets: tuple[str, ...] = ()
    """`TABLE.SETTING=VALUE`."""


def load(given: Overrides, folder: Path) -> UpConfig:
    """Read and check everything. `folder`: where the services meet, unless they are told another place.

    The path of the file goes into the environment, where the services find it. Raises `Mistakes`.
    """
    if given.config is not None:
        os.environ[CONFIG_VARIABLE] = str(given.config.absolute())
    path = os.environ.get(CONFIG_VARIABLE)
    tables = _read(Path(path)) if path else {}
    own, wrong = _own_table(tables.get(TABLE, {}), path or "")
    if given.executors is not None and not 0 <= given.executors <= MAX_EXECUTORS:
        raise Mistakes(*wrong, f"--executors: must be a number from 0 to {MAX_EXECUTORS} (got {given.executors})")
    sets, places = _sets(given.sets)
    for name, value in (("host", given.host), ("port", given.port), ("admin-port", given.admin_port)):
        if value is not None:
            sets["scheduler"] += [f"--{name}", str(value)]
    if given.frontends is not None:
        sets["scheduler"] += ["--frontends", str(given.frontends)]
    if given.model is not None:
        sets["executor"] += ["--model", given.model]
    executors = _executors(own, given.executors, path or "")
    wrong += _named(tables, sets["executor"], path or "")
    is_named = "executor_bind" in underscored(tables.get("scheduler")) or "GILIR_EXECUTOR_BIND" in os.environ
    if not is_named and "--executor-bind" not in sets["scheduler"]:
        sets["scheduler"] += ["--executor-bind", f"ipc://{folder}/executors.sock"]
    settings, scheduler_wrong = check_scheduler(sets["scheduler"], places["scheduler"])
    if settings is not None and executors and "hold_s" not in settings.model_fields_set:
        sets["scheduler"] += ["--hold-s", f"{HOLD_S:g}"]
    bind = "ipc://none" if settings is None else settings.executor_bind
    table = underscored(tables.get("executor"))
    dials = [] if "scheduler" in table or "GILIR_SCHEDULER" in os.environ else ["--scheduler", dialled(bind)]
    devices = _devices(executors, sets["executor"], table)
    flags = {
        name: (*dials, *own_flags, *sets["executor"], *devices[name], "--name", name)
        for name, own_flags in executors.items()
    }
    wrong += scheduler_wrong + misplaced(tables, path or "")
    if path or given.sets or any(executors.values()):
        in_tables = [
            {flag: f"{path}: [[{TABLE}.executor]] {name} {flag[2:]}" for flag in own_flags if flag.startswith("--")}
            for name, own_flags in executors.items()
        ]
        wrong += check_executors(
            [list(own_flags) for own_flags in flags.values()], [own | places["executor"] for own in in_tables]
        )
    if settings is None or wrong:
        raise Mistakes(*dict.fromkeys(wrong))
    logs = given.logs if given.logs is not None else own.get("logs")
    return UpConfig(settings, tuple(sets["scheduler"]), flags, None if logs is None else Path(logs))


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise Mistakes(f"{path}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Mistakes(f"{path}: {error}") from None


def _own_table(table: Any, path: str) -> tuple[dict[str, Any], list[str]]:
    """The table `[up]` as far as it is right, and what is wrong with it. Raises `Mistakes` where it is no table."""
    where = f"{path}: [{TABLE}]"
    if not isinstance(table, dict):
        raise Mistakes(f"{path}: {TABLE} must be a table")
    wrong = [f"{where} {name}: there is no such setting" for name in table if name not in FIELDS]
    count, logs, listed = table.get("executors", 1), table.get("logs"), table.get("executor", [])
    if type(count) is not int or not 0 <= count <= MAX_EXECUTORS:
        wrong.append(f"{where} executors: must be a number from 0 to {MAX_EXECUTORS} (got {count!r})")
    if logs is not None and not isinstance(logs, str):
        wrong.append(f"{where} logs: must be a folder (got {logs!r})")
    if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
        wrong.append(f"{where} executor: must be tables, each below a line [[{TABLE}.executor]]")
        listed = []
    elif "executors" in table and listed and count != len(listed):
        wrong.append(f"{where} executors: is {count}, but [[{TABLE}.executor]] stands {len(listed)} times")
    return ({"executor": listed} if wrong else table), wrong


def _executors(own: dict[str, Any], count: int | None, path: str) -> dict[str, list[str]]:
    """The names of the executors, each with the flags of its own table."""
    listed = own.get("executor", [])
    number = count if count is not None else len(listed) or own.get("executors", 1)
    named: dict[str, list[str]] = {}
    for i in range(number):
        fields = underscored(listed[i]) if i < len(listed) else {}
        where = f"{path}: [[{TABLE}.executor]]"
        odd = [f"{where} {field}: must be one value (got {v!r})" for field, v in fields.items() if not _is_one(v)]
        if odd:
            raise Mistakes(*odd)
        name = str(fields.pop("name", f"executor-{i}"))
        if not NAME.fullmatch(name) or name == SCHEDULER:
            rule = f"must be 1 to 100 letters, digits and characters of _ . : -, and not {SCHEDULER}"
            raise Mistakes(f"{where} name: {rule} (got {name!r})")
        if name in named:
            raise Mistakes(f"{where} name: there are two of {name!r}")
        named[name] = [part for field, value in fields.items() for part in _flag(field, value)]
    return named


def _named(tables: dict[str, Any], sets: list[str], path: str) -> list[str]:
    """What is wrong where all executors are given one name."""
    places = [f"{path}: [executor] name"] if "name" in underscored(tables.get("executor")) else []
    places += ["--set executor.name"] if "--name" in sets else []
    return [f"{place}: each executor has a name of its own: set it in [[{TABLE}.executor]]" for place in places]


def _devices(executors: dict[str, list[str]], sets: list[str], table: dict[str, Any]) -> dict[str, list[str]]:
    """Flags by executor: a GPU for each, where the settings name none. `table`: `[executor]` of the file."""
    everyones = os.environ.get("GILIR_DEVICE") or str(table.get("device", "auto"))
    told = [_last("--device", sets) or _last("--device", own) or everyones for own in executors.values()]
    found = zip(executors, told, spread(told), strict=True)
    return {name: [] if device == before else ["--device", device] for name, before, device in found}


def _last(flag: str, flags: list[str]) -> str:
    """The value of a flag that counts; empty where it is not given."""
    return next((value for name, value in reversed(list(pairwise(flags))) if name == flag), "")


def _is_one(value: Any) -> bool:
    return "\0" not in value if isinstance(value, str) else isinstance(value, (int, float, bool))


def _flag(field: str, value: Any) -> list[str]:
    flag = field.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}", str(value)]


def _sets(texts: tuple[str, ...]) -> tuple[dict[str, list[str]], dict[str, dict[str, str]]]:
    """Flags by service, from `TABLE.SETTING=VALUE`; and for each flag what was written for it."""
    flags: dict[str, list[str]] = {"scheduler": [], "executor": []}
    places: dict[str, dict[str, str]] = {"scheduler": {}, "executor": {}}
    for text in texts:
        place, equals, value = text.partition("=")
        table, dot, name = place.partition(".")
        if not (equals and dot and name) or table not in flags:
            raise Mistakes(f"--set {text}: must be scheduler.SETTING=VALUE or executor.SETTING=VALUE")
        flag = name.replace("_", "-")
        # The form that switches take, too.
        given = {"true": [f"--{flag}"], "false": [f"--no-{flag}"]}.get(value.lower(), [f"--{flag}", value])
        flags[table] += given
        places[table][given[0]] = f"--set {place}"
    return flags, places


def dialled(bound: str) -> str:
    """The address that executors of this machine dial where the scheduler has bound another one to all interfaces."""
    parts = urlsplit(bound)
    if parts.scheme == "tcp" and parts.hostname in ("0.0.0.0", "*"):
        return f"tcp://127.0.0.1:{parts.port}"
    if parts.scheme == "tcp" and parts.hostname == "::":
        return f"tcp://[::1]:{parts.port}"
    return bound
