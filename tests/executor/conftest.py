from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from executor_svc.determinism import prepare_environment
from tests.executor.scripted_scheduler import ScriptedScheduler

if "torch" not in sys.modules:
    prepare_environment()


@pytest.fixture
def scheduler() -> Iterator[ScriptedScheduler]:
    scripted = ScriptedScheduler()
    yield scripted
    scripted.close()
