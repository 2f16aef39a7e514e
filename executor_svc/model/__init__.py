"""Models: config.json and safetensors files, or a GGUF file, in; a decoder and a model card out."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch

from common.wire import ModelCard
from executor_svc.model.config import ModelConfig, Quantization
from executor_svc.model.cpu_step import CpuStep, make_decoder
from executor_svc.model.decoder import Decoder
from executor_svc.model.errors import ModelError
from executor_svc.model.fingerprint import model_fingerprint
from executor_svc.model.hub import model_folder
from executor_svc.model.loader import load_weights
from executor_svc.model.native import NativeDecoder
from executor_svc.model.source import open_source
from kernels import check_attention_shape
from kernels.float8 import E4M3

__all__ = ["Decoder", "LoadedModel", "ModelConfig", "ModelError", "NativeDecoder", "load_model"]

log = structlog.get_logger()


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, and what the scheduler service is told of it."""

    decoder: Decoder | NativeDecoder
    card: ModelCard


def load_model(
    path: str,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    max_model_len: int | None = None,
    quantization: Quantization = "none",
    name: str | None = None,
    kv_cache_dtype: str = "auto",
    cpu_step: CpuStep = "native",
    batch_invariant: bool = False,
) -> LoadedModel:
    """Load a Hugging Face model folder, a GGUF file or the folder of one, or a hub id where the hub can be reached.

    dtype: float32, float16, bfloat16, or auto: the config's, float32 where it names none; of a GGUF file bfloat16.
    max_model_len: at most what the config allows; None takes that.
    quantization: int8 or fp8 stores the decoder's linear layers in eight bits, one tensor at a time as they are loaded.
    kv_cache_dtype: auto or fp8, as the runner will keep KV: other KV gives other answers, so the fingerprint tells.
    cpu_step: native or torch, on a CPU: what computes the forward pass; native takes torch where it must.
    batch_invariant: as in `Decoder`; other bits are other answers too.
    name: what the model is served as; None takes the folder's name, or the hub id.
    Raises `ModelError` with one plain line: for anything the files lack, and for anything they ask that is not done.
    """
    place = model_folder(path)
    source = open_source(place)
    served_name = name or (source.name if Path(path).expanduser().exists() else path)
    config = source.config(dtype, max_model_len, quantization)
    if config.ignored_fields:
        log.warning("config.json has fields unknown here; they are not used", fields=config.ignored_fields)
    if not device.startswith("cpu"):
        _check_attention(config, kv_cache_dtype, place)
    started = time.monotonic()
    numbers = config.precision if kv_cache_dtype == "auto" else f"{config.precision}, KV {kv_cache_dtype}"
    numbers += ", batch-invariant" if batch_invariant else ""
    with ThreadPoolExecutor(1, "fingerprint") as pool:
        digest = pool.submit(model_fingerprint, *source.files(), numbers)
        weights = load_weights(source.checkpoint(), config, _device(device))
        decoder = make_decoder(config, weights, cpu_step, kv_cache_dtype, batch_invariant=batch_invariant)
        del weights
        loaded = time.monotonic()
        card = source.card(config, digest.result(), served_name)
    log.info(
        "model loaded",
        model=card.name,
        device=str(decoder.device),
        step="native" if isinstance(decoder, NativeDecoder) else "torch",
        weights_s=round(loaded - started, 2),
        total_s=round(time.monotonic() - started, 2),
    )
    return LoadedModel(decoder, card)


_FIELDS = {"heads": "num_attention_heads", "kv_heads": "num_key_value_heads"}
"""What config.json calls what the kernels name otherwise."""


def _check_attention(config: ModelConfig, kv_cache_dtype: str, where: Path) -> None:
    """Raises `ModelError`, before any weight is read, for a shape that the GPU's attention does not serve."""
    kv_dtype = E4M3 if kv_cache_dtype == "fp8" else None
    shape = (config.head_dim, config.num_heads, config.num_kv_heads)
    try:
        check_attention_shape(*shape, block_size=1, dtype=config.dtype, kv_dtype=kv_dtype)  # every block size is served
    except ValueError as error:
        name, _, rest = str(error).partition(" ")
        raise ModelError(f"{where}: {_FIELDS.get(name, name)} {rest}") from error


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"device: {name!r} cannot be used: {str(error).splitlines()[0]}") from error
    return device
