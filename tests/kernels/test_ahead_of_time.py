"""Every kernel compiled for every chip, without a GPU. A file of its own, to run beside the other long lane."""

from __future__ import annotations

import json
import re

import pytest

from tests.kernels.launches.launch import CHIPS
from tests.kernels.own_process import HERE, ROOT, run

KERNEL = re.compile(r"^def (\w+_kernel)\(", re.MULTILINE)


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
