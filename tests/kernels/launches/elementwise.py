"""Norms and gates."""

from __future__ import annotations

from kernels.gated_activation import gelu_tanh_mul_triton, silu_mul_triton
from kernels.rms_norm import add_rms_norm_triton, rms_norm_triton
from tests.kernels.launches.launch import Launch, empty

LAUNCHES = {
    "rms_norm 2560": Launch(lambda: rms_norm_triton(empty(4, 2560), empty(2560), 1e-6)),
    "rms_norm heads 128": Launch(lambda: rms_norm_triton(empty(4, 8, 128), empty(128), 1e-6)).on("sm_90"),
    "add_rms_norm 4096": Launch(lambda: add_rms_norm_triton(empty(4, 4096), empty(4, 4096), empty(4096), 1e-6)).on(
        "sm_80"
    ),
    "add_rms_norm 8192 unit offset": Launch(
        lambda: add_rms_norm_triton(empty(4, 8192), empty(4, 8192), empty(8192), 1e-6, unit_offset=True)
    ).on("gfx942"),
    "silu_mul": Launch(lambda: silu_mul_triton(empty(4, 8192))),
    "gelu_tanh_mul": Launch(lambda: gelu_tanh_mul_triton(empty(4, 8192))).on("sm_100"),
}
