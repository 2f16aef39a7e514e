"""The Triton kernels under Triton's interpreter, which must be chosen before Triton is first imported.

So these tests run in a process of their own: `TRITON_INTERPRET=1 pytest tests/kernels/interpreted`, which
`tests/kernels/test_own_processes.py` does. Any other run does not collect them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.kernels import interpreter_speed, memory_guard
else:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def guarded_memory() -> Iterator[None]:
    """Fresh tensors hold NaN, so that what a kernel leaves unwritten shows; stray and racing accesses raise."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    with memory_guard.installed(), interpreter_speed.patched_once_a_launch():
        yield
    torch.use_deterministic_algorithms(False)
