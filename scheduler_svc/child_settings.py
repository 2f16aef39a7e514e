"""Settings that a scheduler tells the processes it starts, and what a file's tables for those may say beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

FRONTENDS_OWN = (
    *("resume_hold_s", "resume_buffer_mb", "max_body_mb", "max_bodies_mb"),
    *("tool_call_parser", "reasoning_parser"),
)
"""Settings of the scheduler that only frontends need: a file has them in `[scheduler]` or in `[frontend]`."""
EACH_ITS_OWN = ("core", "name", "fd")
"""Made up by the scheduler for each process."""
DECIDED = {
    "frontend": (
        *("host", "port", "grace_s", "open_metrics", "log_format", "log_level"),
        *("allow_no_api_keys", "api_keys", "api_key"),
        *("batch_dir", "batch_database", "batch_max_file_mb", "batch_max_tenant_mb"),
    ),
    "admin": ("log_format", "log_level"),
}
"""By table: what the scheduler has, too, and decides for the processes that it starts."""
EITHER = {
    "frontend": {name: name for name in FRONTENDS_OWN},
    "admin": {"key_file": "admin_key_file"},
}
"""By table: what may stand there or, under the second name, in `[scheduler]`."""


def misplaced(tables: Mapping[str, Any], path: str) -> list[str]:
    """A line for each setting that a scheduler would override in silence for the processes that it starts.

    `tables`: of the TOML file at `path`, which they all read.
    """
    scheduler = underscored(tables.get("scheduler"))
    return [
        f"{path}: [{table}] {name.replace('_', '-')}: {text}"
        for table in DECIDED
        for name, text in _misplaced(table, underscored(tables.get(table)), scheduler)
    ]


def _misplaced(table: str, given: dict[str, Any], scheduler: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name in given:
        other = EITHER[table].get(name, "")
        if name in EACH_ITS_OWN:
            yield name, "stands in no file: the scheduler gives each process its own"
        elif name in DECIDED[table]:
            yield name, "the scheduler decides this for the processes that it starts: set it in [scheduler]"
        elif other in scheduler:
            yield name, f"[scheduler] has {other.replace('_', '-')}, which would override it: set one of them"


def underscored(table: Any) -> dict[str, Any]:
    """A table with its names as fields have them; empty for what is no table."""
    return {name.replace("-", "_"): value for name, value in table.items()} if isinstance(table, dict) else {}
