"""Compiles every kernel ahead of time, with no GPU and no driver, and reports what the chips would get.

    python tests/kernels/aot.py [--json]

The real launchers run on meta tensors under a driver that only names a target: so what is compiled is exactly what
they would launch. Run it without TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from kernels.attention import AttentionBatch  # noqa: E402
from kernels.attention_triton import paged_attention_triton  # noqa: E402
from kernels.block_copy import copy_blocks_triton  # noqa: E402
from kernels.gated_activation import gelu_tanh_mul_triton, silu_mul_triton  # noqa: E402
from kernels.penalties import apply_penalties_triton  # noqa: E402
from kernels.philox import gumbel_noise_triton  # noqa: E402
from kernels.rms_norm import add_rms_norm_triton, rms_norm_triton  # noqa: E402
from kernels.rope import rope_and_cache_triton  # noqa: E402
from kernels.sampling import SamplingColumns  # noqa: E402
from kernels.sampling_triton import draw_triton  # noqa: E402

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_LIMIT = {"sm_80": 166912, "sm_90": 232448, "sm_100": 232448, "gfx942": 65536}
"""Bytes of shared memory one program may use."""
BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def ints(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return empty(*shape, dtype=dtype)


def attention(
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    decodes: int = 0,
    chunks: int = 0,
    context: int = 400,
    block_size: int = 16,
    window: int = 0,
    softcap: float = 0.0,
    dtype: torch.dtype = torch.bfloat16,
) -> Callable[[], Any]:
    rows = decodes + chunks
    batch = AttentionBatch(
        query_start=ints(rows + 1, dtype=torch.int32),
        context_lens=ints(rows, dtype=torch.int32),
        block_tables=ints(rows, 64, dtype=torch.int32),
        max_query_len=128 if chunks else 1,
        max_context_len=context,
        num_decodes=decodes,
    )
    q = empty(decodes + 128 * chunks, heads, head_dim, dtype=dtype)
    cache = empty(64, block_size, kv_heads, head_dim, dtype=dtype)
    return lambda: paged_attention_triton(q, cache, cache, batch, 0.1, window=window, softcap=softcap)


def rope(head_dim: int, rotary: int) -> Callable[[], Any]:
    qkv = empty(4, 32 + 8 + 8, head_dim)
    q, k, v = qkv.split([32, 8, 8], dim=1)
    cache = empty(64, 16, 8, head_dim)
    angles = empty(4096, rotary, dtype=torch.float32)
    return lambda: rope_and_cache_triton(q, k, v, angles, ints(4), ints(4), cache, cache)


def draw() -> Callable[[], Any]:
    real = empty(4, dtype=torch.float32)
    columns = SamplingColumns(real, ints(4, dtype=torch.int32), real, real, ints(4), ints(4))
    return lambda: draw_triton(empty(4, 49152, dtype=torch.float32), columns)


def penalties() -> Callable[[], Any]:
    real, entries = empty(4, dtype=torch.float32), ints(99)
    counts, in_prompt = ints(99, dtype=torch.int32), ints(99, dtype=torch.bool)
    logits = empty(4, 49152, dtype=torch.float32)
    return lambda: apply_penalties_triton(logits, entries, entries, counts, in_prompt, real, real, real)


LAUNCHES: dict[str, Callable[[], Any]] = {
    "decode bf16 9/3x64": attention(9, 3, 64, decodes=4),
    "decode bf16 32/8x128 split": attention(32, 8, 128, decodes=4, context=9000),
    "decode bf16 4/1x256 window": attention(4, 1, 256, decodes=4, context=9000, window=512),
    "decode fp32 28/4x80 softcap": attention(28, 4, 80, decodes=4, softcap=50.0, block_size=32, dtype=torch.float32),
    "decode fp32 8/4x256": attention(8, 4, 256, decodes=4, dtype=torch.float32),
    "prefill bf16 9/3x64": attention(9, 3, 64, chunks=2),
    "prefill bf16 32/8x128": attention(32, 8, 128, chunks=2),
    "prefill bf16 4/1x256 window": attention(4, 1, 256, chunks=2, window=512),
    "prefill fp32 28/4x80 softcap": attention(28, 4, 80, chunks=2, softcap=50.0, block_size=32, dtype=torch.float32),
    "prefill fp32 8/4x256": attention(8, 4, 256, chunks=2, dtype=torch.float32),
    "rms_norm 2560": lambda: rms_norm_triton(empty(4, 2560), empty(2560), 1e-6),
    "rms_norm heads 128": lambda: rms_norm_triton(empty(4, 8, 128), empty(128), 1e-6),
    "add_rms_norm 4096": lambda: add_rms_norm_triton(empty(4, 4096), empty(4, 4096), empty(4096), 1e-6),
    "add_rms_norm 8192 unit offset": lambda: add_rms_norm_triton(
        empty(4, 8192), empty(4, 8192), empty(8192), 1e-6, unit_offset=True
    ),
    "rope 128": rope(128, 128),
    "rope 96, 32 rotary": rope(96, 32),
    "silu_mul": lambda: silu_mul_triton(empty(4, 8192)),
    "gelu_tanh_mul": lambda: gelu_tanh_mul_triton(empty(4, 8192)),
    "gumbel_noise": lambda: gumbel_noise_triton(ints(4), ints(4), 49152),
    "draw": draw(),
    "penalties": penalties(),
    "copy_blocks": lambda: copy_blocks_triton(empty(8, 16, 8, 128), empty(8, 16, 8, 128), ints(2), ints(2)),
}


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


def report() -> Iterator[dict[str, Any]]:
    """One entry a launch, kernel and target."""
    for target_name, target in TARGETS.items():
        for launch_name, launch in LAUNCHES.items():
            with compiled_kernels(target) as kernels:
                launch()
            for kernel in kernels:
                entry = {"launch": launch_name, "kernel": kernel.metadata.name, "target": target_name}
                yield entry | figures(kernel) | {"shared_limit": SHARED_LIMIT[target_name]}


def table(entries: list[dict[str, Any]]) -> str:
    head = f"{'launch':32}{'kernel':26}{'target':8}"
    lines = [f"{head}{'registers':>10}{'spilled':>8}{'shared':>8}{'limit':>8}{'matrix':>7}"]
    for entry in entries:
        names = f"{entry['launch']:32}{entry['kernel']:26}{entry['target']:8}"
        numbers = f"{entry['registers']:10}{entry['spilled']:8}{entry['shared']:8}{entry['shared_limit']:8}"
        lines.append(f"{names}{numbers}{entry['matrix']:7}")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print a JSON list instead of a table")
    found_entries = list(report())
    print(json.dumps(found_entries) if parser.parse_args().json else table(found_entries))
