"""Which instruction sets the kernels can be compiled for, and which of them this machine runs."""

from __future__ import annotations

import ctypes
import os
import platform
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "GILIR_CPU_ISA"
_CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Isa:
    """One way to compile the kernels."""

    name: str
    needs: frozenset[str]
    """Flags of /proc/cpuinfo. Linux shows one only where it has switched on the registers that go with it."""
    compiler_flags: tuple[str, ...]


_AVX2 = frozenset(("avx2", "fma", "f16c"))
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
_AVX2_FLAGS = ("-mavx2", "-mfma", "-mf16c")
_AVX512_FLAGS = (*_AVX2_FLAGS, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512")
_DOT = _AVX512 | {"avx512_bf16"}
_DOT_FLAGS = (*_AVX512_FLAGS, "-mavx512bf16", "-DGILIR_DOT")
_AMX = _AVX512 | {"amx_tile", "amx_bf16"}
_AMX_FLAGS = (*_AVX512_FLAGS, "-mamx-tile", "-mamx-bf16", "-DGILIR_AMX")
_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18

ISAS = (
    Isa("amx-bf16", _AMX, _AMX_FLAGS),
    Isa("avx512-bf16", _DOT, _DOT_FLAGS),
    Isa("avx512", _AVX512, _AVX512_FLAGS),
    Isa("avx2", _AVX2, _AVX2_FLAGS),
)
"""The best first."""


def usable_isas(cpu_info: str | None = None, machine: str | None = None) -> list[Isa]:
    """The instruction sets that this machine runs, the best first; with `GILIR_CPU_ISA` at most the one it names.

    cpu_info: text in the shape of /proc/cpuinfo; None reads that file. machine: of `platform.machine()`.
    Raises ValueError when the variable names one that is not known, or not to be had here.
    """
    if cpu_info is None:
        try:
            cpu_info = _CPU_INFO.read_text()
        except OSError:
            cpu_info = ""
    flags = _cpu_flags(cpu_info) if (machine or platform.machine()) in ("x86_64", "AMD64") else set()
    found = [isa for isa in ISAS if isa.needs <= flags and (isa.name != "amx-bf16" or amx_permitted())]
    wanted = os.environ.get(VARIABLE, "")
    if not wanted:
        return found
    if wanted not in {isa.name for isa in ISAS}:
        raise ValueError(f"{VARIABLE}={wanted}: not one of {', '.join(isa.name for isa in ISAS)}")
    chosen = [isa for isa in found if isa.name == wanted]
    if not chosen:
        raise ValueError(f"{VARIABLE}={wanted}: this CPU lacks it")
    return chosen


def amx_permitted() -> bool:
    """Asks Linux for the tile registers, which a process must do before it uses them; whether it has them now."""
    call = ctypes.CDLL(None).syscall
    return int(call(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)) == 0


def _cpu_flags(cpu_info: str) -> set[str]:
    for line in cpu_info.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return set(value.split())
    return set()
