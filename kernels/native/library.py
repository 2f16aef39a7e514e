"""The compiled kernels seen from Python: structures of `program.h`, and the functions of `step.cpp`."""

from __future__ import annotations

import ctypes
from enum import IntEnum
from functools import cache
from pathlib import Path

import torch

from kernels.native.build import build
from kernels.native.isa import Isa

C_TYPES = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "f16"}
EIGHT_BIT_C_TYPES = {torch.int8: "i8", torch.float8_e4m3fn: "e4m3"}
LOGITS = -1
"""As `Op.output`: the caller's fp32 tensor."""


class Kind(IntEnum):
    """What an operation does; see `program.h`."""

    EMBED = 0
    NORM = 1
    LINEAR = 2
    ROPE_AND_CACHE = 3
    ATTENTION = 4
    GATED = 5
    ADD = 6
    TAKE_ROWS = 7
    SCALE = 8
    SOFTCAP = 9
    """Of the logits."""
    DIVIDE = 10
    """Of the logits."""
    ROUTE = 11
    GROUP = 12
    EXPAND = 13
    EXPERTS = 14
    COMBINE = 15


ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "clamped_swiglu": 2}
"""As `Op.flag` of GATED."""


class Op(ctypes.Structure):
    """`Op` of program.h."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("input", ctypes.c_int32),
        ("output", ctypes.c_int32),
        ("taken", ctypes.c_int32),
        ("offset", ctypes.c_int32),
        ("count", ctypes.c_int32),
        ("layer", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("rotary", ctypes.c_int32),
        ("flag", ctypes.c_int32),
        ("eight_bits", ctypes.c_int32),
        ("experts", ctypes.c_int32),
        ("pairs", ctypes.c_int32),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("eps", ctypes.c_float),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
    )


class Batch(ctypes.Structure):
    """`Batch` of program.h."""

    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in ["tokens", "rows", "taken", "table_stride", "block_size", "num_blocks", "threads"]
        ),
        *((name, ctypes.c_void_p) for name in ["token_ids", "positions", "slots", "logit_rows"]),
        *((name, ctypes.c_void_p) for name in ["query_start", "context_lens", "block_tables"]),
        *((name, ctypes.c_void_p) for name in ["k_cache", "v_cache", "logits"]),
    )


class Library:
    """The kernels of one instruction set for one number format. Calls leave the interpreter lock."""

    def __init__(self, path: Path, dtype: torch.dtype, eight_bits: torch.dtype | None = None) -> None:
        """eight_bits: what the weights of linear layers may be stored in instead of dtype."""
        self.dtype, self.eight_bits = dtype, eight_bits
        self._functions = functions = ctypes.CDLL(str(path))
        functions.gilir_packed_size.restype = ctypes.c_int64
        functions.gilir_packed_size.argtypes = (ctypes.c_int64, ctypes.c_int64)
        functions.gilir_pack.argtypes = (
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_int64,
            ctypes.c_void_p,
            ctypes.c_int32,
            ctypes.c_int32,
        )
        functions.gilir_create.argtypes = (
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_void_p,
        )
        functions.gilir_destroy.argtypes = (ctypes.c_void_p,)
        functions.gilir_run.argtypes = (ctypes.c_void_p, ctypes.c_void_p)

    def packed_size(self, outputs: int, inputs: int) -> int:
        """Elements of a packed [outputs, inputs] weight."""
        return int(self._functions.gilir_packed_size(outputs, inputs))

    def pack(self, weight: torch.Tensor, target: torch.Tensor) -> None:
        """weight: [outputs, inputs]; target: [packed_size], contiguous; both of the library's dtype, or both in eight
        bits."""
        weight = weight.contiguous()
        outputs, inputs = weight.shape
        if target.numel() != self.packed_size(outputs, inputs) or not self._packs(weight.dtype, target.dtype):
            raise ValueError(f"cannot pack {weight.dtype} {tuple(weight.shape)} into {target.numel()} {target.dtype}")
        threads = torch.get_num_threads()
        eight_bits = int(weight.dtype == self.eight_bits)
        _check(self._functions.gilir_pack(weight.data_ptr(), outputs, inputs, target.data_ptr(), eight_bits, threads))

    def _packs(self, given: torch.dtype, wanted: torch.dtype) -> bool:
        return given == wanted and given in (self.dtype, self.eight_bits)

    def program(self, ops: list[Op], widths: list[int]) -> Program:
        """ops: in order; widths: columns of each buffer that they name."""
        return Program(self._functions, ops, widths)


class Program:
    """A list of operations with its buffers. Not to be run by two threads at once."""

    def __init__(self, functions: ctypes.CDLL, ops: list[Op], widths: list[int]) -> None:
        self._functions = functions
        self._program = ctypes.c_void_p()
        columns = (ctypes.c_int64 * len(widths))(*widths)
        place = ctypes.byref(self._program)
        _check(functions.gilir_create((Op * len(ops))(*ops), len(ops), columns, len(widths), place))

    def __del__(self) -> None:
        self._functions.gilir_destroy(self._program)

    def run(self, batch: Batch) -> None:
        """Raises MemoryError; IndexError for a number that leaves its tensor (checks.h); RuntimeError where there is no
        thread to be had."""
        _check(self._functions.gilir_run(self._program, ctypes.byref(batch)))


def _check(code: int) -> None:
    """Raise what a code of step.cpp stands for."""
    if code == 1:
        raise MemoryError("no memory for the native step")
    if code == 2:
        raise IndexError("a batch's tokens, positions, slots, rows, contexts or blocks are out of range")
    if code:
        raise RuntimeError("the native step failed")


@cache
def load(isa: Isa, dtype: torch.dtype, eight_bits: torch.dtype | None = None) -> Library:
    """The library, built where there is none yet. Raises `BuildError`, and OSError for one that cannot be loaded.

    eight_bits: int8 or float8_e4m3fn, where linear layers store their weights so. Compiled apart: each format takes
    a set of products of its own, and few models need any.
    """
    return Library(build(compiler_flags(isa, dtype, eight_bits)), dtype, eight_bits)


def compiler_flags(isa: Isa, dtype: torch.dtype, eight_bits: torch.dtype | None = None) -> tuple[str, ...]:
    """What the library that `load` wants is compiled with."""
    weights = () if eight_bits is None else (f"-DGILIR_WEIGHTS={EIGHT_BIT_C_TYPES[eight_bits]}",)
    return (*isa.compiler_flags, f"-DGILIR_DTYPE={C_TYPES[dtype]}", *weights)
