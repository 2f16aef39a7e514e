"""Runs what needs a process of its own, because Triton and MKL read the environment once, when they start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def run(*command: str, **environment: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "MKL_CBWR")}
    inherited |= {"PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "PASSIVE"} | environment
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=inherited, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    return done.stdout
