"""Compiles every kernel ahead of time, with no GPU and no driver, and reports what the chips would get.

    python tests/kernels/aot.py [--json] [PART OF A NAME]

The real launchers run on meta tensors under a driver that only names a target: so what is compiled is exactly what
they would launch. Run it without TRITON_INTERPRET. What is compiled stands in `launches/`, a file a family of kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.kernels.launches.launch import Launch  # noqa: E402

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_LIMIT = {"sm_80": 166912, "sm_90": 232448, "sm_100": 232448, "gfx942": 65536}
"""Bytes of shared memory one program may use."""
BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def launches() -> dict[str, Launch]:
    """Of every file in `launches/`; a name stands once."""
    found: dict[str, Launch] = {}
    for path in sorted(Path(__file__).with_name("launches").glob("*.py")):
        if path.stem != "launch":
            entries = importlib.import_module(f"tests.kernels.launches.{path.stem}").LAUNCHES
            assert not found.keys() & entries.keys(), path
            found |= entries
    return found


class TargetOnlyDriver:
    """As much of a Triton driver as compiling asks for."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


@contextlib.contextmanager
def compiled_kernels(target: GPUTarget) -> Iterator[list[Any]]:
    """Inside, a launch compiles and appends its kernel to the list, and runs nothing."""
    kernels: list[Any] = []
    run, active = JITFunction.run, driver._active

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        self.device_caches.clear()  # keyed by the device's number, which is 0 for every target
        kernels.append(run(self, *args, grid=grid, warmup=True, **options))
        return kernels[-1]

    driver.set_active(TargetOnlyDriver(target))
    JITFunction.run = compile_only
    try:
        yield kernels
    finally:
        JITFunction.run = run
        driver._active = active


def figures(kernel: Any) -> dict[str, int]:
    """Registers a thread, spilled bytes (AMD: registers), shared bytes, matrix instructions."""
    shared = kernel.metadata.shared
    if "amdgcn" in kernel.asm:
        text = kernel.asm["amdgcn"]
        counts = {name: int(value) for name, value in re.findall(r"\.(vgpr\w*_count):\s+(\d+)", text)}
        registers, spilled = counts["vgpr_count"], counts["vgpr_spill_count"]
        matrix = len(re.findall(r"v_mfma", text))
    else:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "kernel.cubin"
            path.write_bytes(kernel.asm["cubin"])
            command = [str(BINARIES / "cuobjdump"), "--dump-resource-usage", str(path)]
            usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
        assert found, usage
        registers, spilled = int(found[1]), int(found[2])
        matrix = len(re.findall(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)", kernel.asm["ptx"]))
    return {"registers": registers, "spilled": spilled, "shared": shared, "matrix": matrix}


def report(target_name: str, launch_name: str) -> list[dict[str, Any]]:
    """One entry a kernel of the launch."""
    launch = launches()[launch_name]
    with compiled_kernels(TARGETS[target_name]) as kernels:
        launch.run()
    return [
        {"launch": launch_name, "kernel": kernel.metadata.name, "target": target_name}
        | figures(kernel)
        | {"shared_limit": SHARED_LIMIT[target_name], "spills_allowed": launch.spills.get(target_name, 0)}
        | {"matrix_expected": kernel.metadata.name in launch.matrix}
        for kernel in kernels
    ]


def report_all(processes: int, part: str = "") -> list[dict[str, Any]]:
    """Every launch whose name has `part`, on every chip. One process compiles on one core: so there are several."""
    work = [(chip, name) for name, launch in launches().items() if part in name for chip in launch.chips]
    with ProcessPoolExecutor(processes) as pool:
        return list(itertools.chain.from_iterable(pool.map(report, *zip(*work, strict=True))))


def table(entries: list[dict[str, Any]]) -> str:
    head = f"{'launch':36}{'kernel':26}{'target':8}"
    lines = [f"{head}{'registers':>10}{'spilled':>8}{'shared':>8}{'limit':>8}{'matrix':>7}"]
    for entry in entries:
        names = f"{entry['launch']:36}{entry['kernel']:26}{entry['target']:8}"
        numbers = f"{entry['registers']:10}{entry['spilled']:8}{entry['shared']:8}{entry['shared_limit']:8}"
        lines.append(f"{names}{numbers}{entry['matrix']:7}")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print a JSON list instead of a table")
    parser.add_argument("part", nargs="?", default="", help="only launches whose name has this")
    options = parser.parse_args()
    found_entries = report_all(2, options.part)
    print(json.dumps(found_entries) if options.json else table(found_entries))
