"""The limit of open descriptors: raised as far as it goes, by each of our processes, and never a reason to fail."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

import executor_svc.__main__ as executor
import scheduler_svc.__main__ as scheduler
import scheduler_svc.admin.__main__ as admin
import scheduler_svc.batch_runner.__main__ as batches
import scheduler_svc.frontend.__main__ as frontend
from common.processes import raise_descriptor_limit

LIMIT = resource.RLIMIT_NOFILE


@pytest.fixture
def hard() -> Iterator[int]:
    """The hard limit; the soft one is below it, until the test is over."""
    soft, hard = resource.getrlimit(LIMIT)
    resource.setrlimit(LIMIT, (512, hard))
    yield hard
    resource.setrlimit(LIMIT, (soft, hard))


def test_the_soft_limit_becomes_the_hard_one(hard: int) -> None:
    raise_descriptor_limit()
    assert resource.getrlimit(LIMIT) == (hard, hard)
    raise_descriptor_limit()


@pytest.mark.parametrize("error", [ValueError("current limit exceeds maximum limit"), PermissionError(1, "no")])
def test_where_it_cannot_be_raised_it_stays(hard: int, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(resource, "setrlimit", refuse)
        raise_descriptor_limit()
    assert resource.getrlimit(LIMIT) == (512, hard)


@pytest.mark.parametrize(
    ("process", "flags"),
    [
        (scheduler, []),
        (frontend, ["--core", "ipc://nowhere"]),
        (batches, ["--core", "ipc://nowhere"]),
        (admin, ["--core", "ipc://nowhere", "--fd", "0"]),
        (executor, []),
    ],
    ids=lambda value: value.__name__ if isinstance(value, ModuleType) else "",
)
def test_every_process_raises_it(process: ModuleType, flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Raised(Exception):
        """Far enough: nothing is to be served."""

    def raised() -> None:
        raise Raised

    monkeypatch.setattr(process, "raise_descriptor_limit", raised)
    monkeypatch.setattr(sys, "argv", ["process", *flags])
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # which some set
    with pytest.raises(Raised):
        process.main()
