"""Tests that need their own process, because Triton and MKL read the environment once, when they start."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from executor_svc.determinism import reproducible_branch
from tests.kernels.launches.launch import CHIPS

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
KERNEL = re.compile(r"^def (\w+_kernel)\(", re.MULTILINE)


def run(*command: str, **environment: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "MKL_CBWR")}
    inherited |= {"PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "PASSIVE"} | environment
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=inherited, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    return done.stdout


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


@pytest.mark.timeout(600)
def test_kernels_compile_for_every_chip() -> None:
    """No register spills, shared memory within the chip's limit, matrix units used: the table shows with `-s`."""
    pytest.importorskip("triton")
    from tests.kernels.aot import table

    entries = json.loads(run(str(HERE / "aot.py"), "--json"))
    print("\n" + table(entries))
    names = {name for path in (ROOT / "kernels").glob("*.py") for name in KERNEL.findall(path.read_text())}
    assert {entry["kernel"] for entry in entries} == names
    assert {entry["target"] for entry in entries} == set(CHIPS)
    for entry in entries:
        assert entry["spilled"] <= entry["spills_allowed"], entry
        assert entry["shared"] <= entry["shared_limit"], entry
        assert entry["matrix"] > 0 or not entry["matrix_expected"], entry
