"""Tests that need their own process, because Triton and MKL read the environment once, when they start."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch

from executor_svc.determinism import reproducible_branch
from tests.kernels.own_process import HERE, run


@pytest.mark.timeout(600)
def test_kernels_under_the_interpreter() -> None:
    pytest.importorskip("triton")
    # The interpreter multiplies with numpy, whose newer kernels round a row by its place in a tile on some CPUs.
    plain = {"OPENBLAS_CORETYPE": "Nehalem"} if platform.machine() == "x86_64" else {}
    output = run("-m", "pytest", str(HERE / "interpreted"), "-p", "no:cacheprovider", TRITON_INTERPRET="1", **plain)
    assert " passed" in output or "100%" in output


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="the promise rests on MKL")
@pytest.mark.timeout(600)
def test_same_answer_whatever_the_batch() -> None:
    run(
        "-m",
        "pytest",
        str(HERE / "invariance"),
        "-p",
        "no:cacheprovider",
        MKL_CBWR=reproducible_branch(Path("/proc/cpuinfo").read_text()),
        GILIR_TEST_INVARIANCE="1",
    )
