"""Frontends for the whole session, in front of scripted cores: a process, and one within this process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from frontend_service import Service, run_service, wait_until
from tooled import TEMPLATES, Tooled, opened


@pytest.fixture(scope="session")
def shared_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with run_service(tmp_path_factory.mktemp("ipc")) as service:
        yield service


@pytest.fixture
def service(shared_service: Service) -> Service:
    """The session's service, with the core as new."""
    shared_service.core.reset()
    wait_until(lambda: shared_service.get("/health").status_code == 200)
    return shared_service


@pytest.fixture(scope="session")
def shared_tooled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tooled]:
    with opened(tmp_path_factory.mktemp("ipc"), TEMPLATES) as tooled:
        yield tooled


@pytest.fixture
def tooled(shared_tooled: Tooled) -> Tooled:
    """The session's frontend in this process, with the core as new."""
    shared_tooled.core.reset()
    return shared_tooled
