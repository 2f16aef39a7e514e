"""Settings of the math libraries that must stand in the environment before torch is first imported.

By default MKL picks another instruction sequence for every matrix shape, so the fp32 product of a row changes with the
number of rows beside it. In its strict conditional-numerical-reproducibility mode it does not (Intel oneMKL Developer
Guide, "Obtaining Numerically Reproducible Results"): a sequence's tokens then do not depend on its batch mates.

Call `prepare_environment()` first thing in a process, before anything imports torch:

    from executor_svc.determinism import prepare_environment
    prepare_environment()
    import torch
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

VARIABLE = "MKL_CBWR"
_CPU_INFO = Path("/proc/cpuinfo")
_AVX512 = {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"}


def prepare_environment(cpu_info: str | None = None) -> str:
    """Set `MKL_CBWR` unless the user has set it; returns its value.

    cpu_info: text in the shape of /proc/cpuinfo; None reads that file.
    Raises `RuntimeError` when torch is loaded already and the variable is not set: it would come too late.
    """
    if VARIABLE not in os.environ:
        if "torch" in sys.modules:
            raise RuntimeError(f"prepare_environment() must be called before torch is imported ({VARIABLE} is not set)")
        os.environ[VARIABLE] = reproducible_branch(_read_cpu_info() if cpu_info is None else cpu_info)
    return os.environ[VARIABLE]


def reproducible_branch(cpu_info: str) -> str:
    """The widest branch of MKL with a strict mode that this CPU runs; `COMPATIBLE`, without one, elsewhere.

    MKL honours the strict branches on Intel CPUs only. Where they are missing, the linear layers work in tiles of a
    fixed number of rows instead, which is slower (`kernels.linear`).
    """
    vendor, flags = "", set[str]()
    for line in cpu_info.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "vendor_id":
            vendor = value.strip()
        elif name.strip() == "flags":
            flags = set(value.split())
            break
    if vendor != "GenuineIntel":
        return "COMPATIBLE"
    if flags >= _AVX512:
        return "AVX512,STRICT"
    return "AVX2,STRICT" if "avx2" in flags else "COMPATIBLE"


def _read_cpu_info() -> str:
    try:
        return _CPU_INFO.read_text()
    except OSError:
        return ""
