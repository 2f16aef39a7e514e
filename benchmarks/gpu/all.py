"""Everything that only a GPU can tell, in one call of less than ten minutes.

    python -m benchmarks.gpu.all                         on the first GPU
    python -m benchmarks.gpu.all --device cpu --tiny     does it run at all

Each part runs in a process of its own with its own time, so one that fails or hangs takes no other with it. A result is
one JSON object a line; a table of all follows.

Where there is no package index, carry the wheels: `pip download --no-deps -d wheels --only-binary=:all:
--python-version 3.12 --implementation cp --platform manylinux2014_x86_64 structlog msgpack safetensors pytest pluggy
iniconfig packaging pygments`, then `--wheels wheels`. Torch, numpy and Triton must be there.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PARTS = {
    "kernel_tests": 140,
    "decode": 130,
    "batch_invariant": 80,
    "same_answer": 40,
    "large_pool": 40,
    "first_request": 90,
    "transformers_peer": 70,
}
"""Seconds that each may take; all together stay below ten minutes."""


def main(arguments: list[str] | None = None) -> int:
    """Returns 1 when a part failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu")
    parser.add_argument("--tiny", action="store_true", help="small shapes, few steps: to see that it runs")
    parser.add_argument("--parts", default=",".join(PARTS), help="which, and in which order")
    parser.add_argument("--wheels", type=Path, help="folder of wheels to be used in place of installed packages")
    parser.add_argument("--out", type=Path, help="file for the JSON lines too")
    parser.add_argument("--here", action="store_true", help="in this process: for a debugger")
    options = parser.parse_args(arguments)
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        if options.wheels:
            unpack(options.wheels, Path(folder))
        for name in options.parts.split(","):
            found = run_here(name, options) if options.here else run_apart(name, options, Path(folder))
            for row in found:
                line = json.dumps(row)
                print(line, flush=True)
                results.append(row)
                if options.out:
                    with options.out.open("a") as file:
                        file.write(line + "\n")
    print(table(results))
    return int(any(row["what"] == "FAILED" for row in results))


def unpack(wheels: Path, folder: Path) -> None:
    """Make the packages of all wheels importable from the folder, here and in child processes."""
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    sys.path.append(str(folder))


def run_here(name: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The rows of a part, and one that says how it ended if not well."""
    seconds = PARTS.get(name, 60)
    started = time.monotonic()
    try:
        import torch

        from benchmarks.gpu.context import Context, SkippedError
    except Exception as error:
        yield {"part": name, "what": "FAILED", "why": f"{type(error).__name__}: {error}"}
        return
    try:
        module = importlib.import_module(f"benchmarks.gpu.{name}")
        device = torch.device(options.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        elif options.tiny:
            torch.set_num_threads(1)
        for row in module.rows(Context(device, options.tiny, started + seconds)):
            yield {"part": name, **row}
    except SkippedError as why:
        yield {"part": name, "what": "skipped", "why": str(why)}
    except Exception as error:
        traceback.print_exc()
        yield {"part": name, "what": "FAILED", "why": f"{type(error).__name__}: {error}"[:2000]}
    yield {"part": name, "what": "time", "seconds": round(time.monotonic() - started, 1)}


def run_apart(name: str, options: argparse.Namespace, packages: Path) -> Iterator[dict[str, Any]]:
    """The same in a process of its own, which is killed when it takes too long."""
    command = [sys.executable, "-m", "benchmarks.gpu.all", "--here", "--parts", name, "--device", options.device]
    command += ["--tiny"] if options.tiny else []
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", ""), str(packages)])
    }
    seconds = PARTS.get(name, 60) + 20
    with tempfile.TemporaryFile("w+") as output:
        try:
            code: int | str = subprocess.run(
                command, cwd=ROOT, env=environment, stdout=output, timeout=seconds, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            code = f"killed after {seconds} s"
        output.seek(0)
        lines = output.read().splitlines()
    found = [json.loads(line) for line in lines if line.startswith("{")]
    yield from found
    if not any(row["what"] in ("time", "FAILED") for row in found):
        yield {"part": name, "what": "FAILED", "why": f"its process ended: {code}"}


def table(results: list[dict[str, Any]]) -> str:
    """One line a row: the part, and its figures by name."""
    lines = []
    for row in results:
        figures = "  ".join(f"{key} {value}" for key, value in row.items() if key not in ("part", "what"))
        lines.append(f"{row['part']:<18} {row['what']:<16} {figures}")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
