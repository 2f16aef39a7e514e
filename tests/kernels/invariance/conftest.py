"""Bit for bit the same answer whatever the batch: a promise of the CPU path that MKL keeps only when MKL_CBWR is set
before torch starts. So these tests run in a process of their own, which `tests/kernels/test_own_processes.py` starts
with GILIR_TEST_INVARIANCE=1. Any other run does not collect them.
"""

from __future__ import annotations

import os

if os.environ.get("GILIR_TEST_INVARIANCE") != "1":
    collect_ignore_glob = ["test_*.py"]
