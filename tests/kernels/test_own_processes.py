"""Tests that need their own process, because Triton and MKL read the environment once, when they start."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch

from executor_svc.determinism import reproducible_branch
from tests.kernels.own_process import HERE, run

PICKS = [pytest.param("not nightly", id="some"), pytest.param("nightly", marks=pytest.mark.nightly, id="the others")]
"""Expressions that choose among the tests of a process of its own."""


@pytest.mark.parametrize("pick", PICKS)
@pytest.mark.timeout(600)
def test_kernels_under_the_interpreter(pick: str) -> None:
    pytest.importorskip("triton")
    # The interpreter multiplies with numpy, whose newer kernels round a row by its place in a tile on some CPUs.
    plain = {"OPENBLAS_CORETYPE": "Nehalem"} if platform.machine() == "x86_64" else {}
    where = ("-m", "pytest", str(HERE / "interpreted"), "-m", pick, "-p", "no:cacheprovider")
    output = run(*where, TRITON_INTERPRET="1", **plain)
    assert " passed" in output or "100%" in output


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="the promise rests on MKL")
@pytest.mark.parametrize("pick", PICKS)
@pytest.mark.timeout(600)
def test_same_answer_whatever_the_batch(pick: str) -> None:
    run(
        "-m",
        "pytest",
        str(HERE / "invariance"),
        "-m",
        pick,
        "-p",
        "no:cacheprovider",
        MKL_CBWR=reproducible_branch(Path("/proc/cpuinfo").read_text()),
        GILIR_TEST_INVARIANCE="1",
    )
