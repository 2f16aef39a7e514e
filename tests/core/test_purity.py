"""The core is pure: importing it brings in neither an event loop, nor sockets, nor torch."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["scheduler_svc.core", "common.wire"])
def test_the_core_imports_only_what_is_pure(module: str) -> None:
    code = f"import sys, {module}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert module in loaded
    assert not {"asyncio", "torch", "zmq", "fastapi", "uvicorn", "transformers"} & set(loaded)
