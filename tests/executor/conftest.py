from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.executor.scripted_scheduler import ScriptedScheduler


@pytest.fixture
def scheduler() -> Iterator[ScriptedScheduler]:
    scripted = ScriptedScheduler()
    yield scripted
    scripted.close()
