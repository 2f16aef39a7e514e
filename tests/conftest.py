"""For every test process: what must stand in the environment before torch is imported."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import zmq

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
    "test_structured.py",
    "test_machine.py",
    "test_chaos.py",
    "test_same_answer.py",
    "test_model_families.py",
    "test_model_determinism.py",
    "test_handover.py",
    "test_swap.py",
    "test_up.py",
    "test_serve.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first: files are dealt out in this order, and none should be left alone at the end.

    xdist keeps the order with `--no-loadscope-reorder` only.
    """
    place = {name: index for index, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))


@pytest.fixture(autouse=True)
def _no_context_is_left_open() -> Iterator[None]:
    """A ZeroMQ context that is dropped with an open socket waits for ever in the garbage collector, in another test."""
    made: list[zmq.Context] = []
    begin = zmq.Context.__init__

    def noted(context: zmq.Context, *arguments: object, **named: object) -> None:
        begin(context, *arguments, **named)
        made.append(context)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zmq.Context, "__init__", noted)
        yield
    assert all(context.closed for context in made), "a ZeroMQ context was not terminated"
