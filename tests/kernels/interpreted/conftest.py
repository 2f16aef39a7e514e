"""The Triton kernels under Triton's interpreter, which must be chosen before Triton is first imported.

So these tests run in a process of their own: `TRITON_INTERPRET=1 pytest tests/kernels/interpreted`, which
`tests/kernels/test_own_processes.py` does. Without that variable they run where there is a GPU, compiled, on it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = not INTERPRETED and torch.cuda.is_available()
if INTERPRETED:
    from tests.kernels import interpreter_speed, memory_guard
elif ON_GPU:
    from tests.kernels import mirror

    collect_ignore_glob = ["test_guard.py"]
else:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def launches() -> Iterator[None]:
    """Fresh tensors hold NaN, so that what a kernel leaves unwritten shows. Under the interpreter, stray and racing
    accesses raise; on a GPU, the tests' tensors are taken there for each launch."""
    if not INTERPRETED and not ON_GPU:  # a file named on the command line is collected all the same
        pytest.skip("needs TRITON_INTERPRET=1, or a GPU")
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    with contextlib.ExitStack() as stack:
        if INTERPRETED:
            stack.enter_context(memory_guard.installed())
            stack.enter_context(interpreter_speed.patched_once_a_launch())
        else:
            stack.enter_context(mirror.installed())
        yield
    torch.use_deterministic_algorithms(False)
