"""The uniforms of `kernels.philox`, drawn natively where the source compiles."""

from __future__ import annotations

import ctypes
import logging
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.native.build import BuildError, build
from kernels.native.isa import usable_isas

log = logging.getLogger(__name__)


def draw_uniforms(
    keys: NDArray[np.uint64], positions: NDArray[np.int64], tokens: NDArray[np.int64] | None, width: int
) -> torch.Tensor | None:
    """The uniforms of each row's tokens; None where there is no compiler.

    keys, positions: [B]. tokens: [B, width], or None: 0 … width - 1 in every row. Returns fp32 [B, width] in (0, 1).
    """
    library = _library()
    if library is None:
        return None
    keys, positions = np.ascontiguousarray(keys), np.ascontiguousarray(positions, np.int64)
    if tokens is not None:
        tokens = np.ascontiguousarray(tokens, np.int64)
    out = torch.empty((len(keys), width), dtype=torch.float32)
    places = None if tokens is None else tokens.ctypes.data
    threads = torch.get_num_threads()
    failed = library.gilir_uniforms(
        keys.ctypes.data, positions.ctypes.data, places, len(keys), width, out.data_ptr(), threads
    )
    return None if failed else out


@cache
def _library() -> ctypes.CDLL | None:
    try:
        vectors = ("-mavx2",) if usable_isas() else ()
        library = ctypes.CDLL(str(build(vectors, "noise.cpp")))
    except (BuildError, OSError, ValueError) as error:
        log.warning("numpy draws the noise instead of the native code: %s", error)
        return None
    pointer = ctypes.c_void_p
    library.gilir_uniforms.argtypes = (*(pointer,) * 3, ctypes.c_int64, ctypes.c_int64, pointer, ctypes.c_int32)
    return library
