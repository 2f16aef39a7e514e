"""Which decoder serves a model: on a CPU the native step where it can, torch everywhere else."""

from __future__ import annotations

from typing import Literal

import structlog
import torch

from common.logs import COMPILING
from executor_svc.model.config import ModelConfig
from executor_svc.model.decoder import Decoder
from executor_svc.model.native import NativeDecoder, eight_bits, obstacle
from executor_svc.model.weights import Weights
from kernels.native.build import BuildError, is_built
from kernels.native.isa import usable_isas
from kernels.native.library import Library, compiler_flags, load
from kernels.native.self_check import self_check

CpuStep = Literal["native", "torch"]

log = structlog.get_logger()


def make_decoder(
    config: ModelConfig, weights: Weights, cpu_step: CpuStep, kv_cache_dtype: str, *, batch_invariant: bool = False
) -> Decoder | NativeDecoder:
    """The decoder of `weights`, which are its own from then on.

    cpu_step: native takes torch all the same, and says why in a line of the log, where the model or the machine asks.
    batch_invariant: as in `Decoder`; the native step always is.
    """
    if weights.embedding.device.type != "cpu" or cpu_step == "torch":
        return Decoder(config, weights, batch_invariant=batch_invariant)
    reason = obstacle(config, weights) or ("an fp8 KV cache" if kv_cache_dtype != "auto" else None)
    library = None
    if reason is None:
        library, reason = find_library(config.dtype, eight_bits(config))
    if library is None:
        log.warning("torch serves the model instead of the native CPU step", reason=reason)
        return Decoder(config, weights, batch_invariant=batch_invariant)
    return NativeDecoder(config, weights, library)


def find_library(dtype: torch.dtype, weights: torch.dtype | None = None) -> tuple[Library | None, str]:
    """The kernels of the best instruction set that compiles, loads and passes its check; else None and the reason.

    weights: what linear layers store them in, if in eight bits.
    """
    reason = "no instruction set that the kernels are written for"
    try:
        isas = usable_isas()
    except ValueError as error:
        return None, str(error)
    for isa in isas:
        log.info("native CPU step", isa=isa.name)
        try:
            if not is_built(compiler_flags(isa, dtype, weights)):
                log.info(COMPILING, isa=isa.name)
            library = load(isa, dtype, weights)
            if self_check(library):
                return library, ""
            reason = f"{isa.name}: the kernels do not compute what torch does"
        except (BuildError, OSError) as error:
            reason = f"{isa.name}: {error}"
        if isa is not isas[-1]:
            log.warning("an instruction set cannot be used", isa=isa.name, reason=reason)
    return None, reason
