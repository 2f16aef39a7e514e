"""The rooms of the scheduler service import each other in one direction: docs/architecture.md."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

SERVICE = Path(__file__).resolve().parents[2] / "scheduler_svc"
MAY_IMPORT: dict[str, set[str]] = {
    "core": set(),
    "http": set(),
    "keys": set(),
    "metrics": {"core"},
    "membership": {"core", "pauses", "tickets", "watching"},
    "plan_log": {"core"},
    "watching": {"core"},
    "simulator": {"core", "plan_log"},
    "batches": {"http", "keys"},
    "frontend": {"batches", "http", "keys", "metrics"},
    "batch_runner": {"frontend", "batches", "http", "keys", "metrics"},
    "admin": {"core", "http", "keys", "membership", "metrics"},
    "child_settings": set(),
    "restarts": set(),
    "cli": {"admin", "child_settings", "frontend", "restarts", "settings", "simulator", "supervisor"},
}
"""What each room, a folder or a file, may import of the others."""
PURE = sys.stdlib_module_names | {"common", "numpy", "scheduler_svc"}
"""All that the core imports."""


def imports(source: str) -> Iterator[str]:
    """Dotted names of what a source imports, anywhere in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ("." * node.level + f"{node.module or ''}.{alias.name}" for alias in node.names)


def faults(room: str, source: str) -> list[str]:
    """What a source in this room imports although it may not."""
    return [name for name in imports(source) if not _may_import(room, *name.split(".")[:2])]


def _may_import(room: str, top: str, other: str = "") -> bool:
    if top == "scheduler_svc":
        return other == room or other in MAY_IMPORT[room]
    return top in PURE if room == "core" else top not in ("", "executor_svc", "kernels")


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_only_those_below_it(room: str) -> None:
    paths = [SERVICE / f"{room}.py"] if (SERVICE / f"{room}.py").exists() else list((SERVICE / room).rglob("*.py"))
    assert paths
    assert not [f"{path.relative_to(SERVICE)}: {name}" for path in paths for name in faults(room, path.read_text())]


def test_every_room_is_listed_and_no_two_lie_below_each_other() -> None:
    assert {path.parent.name for path in SERVICE.glob("*/__init__.py")} <= MAY_IMPORT.keys()
    TopologicalSorter(MAY_IMPORT).prepare()  # raises CycleError


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("core", "import scheduler_svc.http.errors"),
        ("core", "import zmq"),
        ("batches", "from scheduler_svc.frontend.auth import key_of"),
        ("frontend", "from scheduler_svc import admin"),
        ("frontend", "def f():\n    from scheduler_svc.batch_runner import runner"),
        ("http", "from scheduler_svc.frontend.call import Call"),
        ("admin", "from ..frontend import call"),
        ("frontend", "import executor_svc.link"),
    ],
)
def test_what_goes_the_other_way_would_be_found(room: str, source: str) -> None:
    assert len(faults(room, source)) == 1
