"""For every test process: what must stand in the environment before torch is imported."""

from __future__ import annotations

import os

import pytest

from common.logs import configure_logs
from executor_svc.determinism import prepare_environment

# Test processes share the cores with the services that they start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
prepare_environment()
# A command that a test calls sets up the logs of its whole process: so they are the same before and after it.
configure_logs("tests")

LONG_FILES = (
    "test_own_processes.py",
    "test_ahead_of_time.py",
    "test_gpu_benchmark.py",
    "test_failover.py",
    "test_chaos.py",
    "test_same_answer.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first: files are dealt out in this order, and none should be left alone at the end.

    xdist keeps the order with `--no-loadscope-reorder` only.
    """
    place = {name: index for index, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))
