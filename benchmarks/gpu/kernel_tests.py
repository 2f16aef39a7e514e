"""The kernel tests, compiled, on the GPU. On a CPU: one file of them under Triton's interpreter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu.context import Context, Row, SkippedError

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "kernels" / "interpreted"
OUTCOME = re.compile(r"(\d+) (passed|failed|errors?|skipped)")
NAMES = re.compile(r"^(?:FAILED|ERROR) (\S+)(.*)", re.MULTILINE)


def rows(context: Context) -> Iterator[Row]:
    """One row of counts, and one for every test that failed."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path])
    target = FOLDER
    if not context.on_gpu:
        environment["TRITON_INTERPRET"] = "1"
        target = FOLDER / "test_batch_input_kernels.py"
    command = [sys.executable, "-m", "pytest", str(target), "-q", "-rfE", "--tb=line", "-p", "no:cacheprovider"]
    command += ["-o", "addopts=--import-mode=importlib", "-W", "ignore"]
    patience = max(1.0, context.deadline - time.monotonic())
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=patience)
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        raise RuntimeError(f"not done in time; so far {output[-200:]!r}") from error
    if "No module named pytest" in done.stderr:
        raise SkippedError("pytest is not installed (see --wheels)")
    counts = {
        name.rstrip("s") if name.startswith("error") else name: int(n) for n, name in OUTCOME.findall(done.stdout)
    }
    if not counts:
        raise RuntimeError(done.stdout[-1000:] + done.stderr[-1000:])
    yield {"what": "tests", **counts}
    for name, why in NAMES.findall(done.stdout):
        yield {"what": "failure", "test": Path(name).name, "why": why.strip(" -")[:300]}
