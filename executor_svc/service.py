"""Start of an executor: load the model, size the KV cache, warm up, attach."""

from __future__ import annotations

import os
import platform
import sys
import time

import structlog
import torch

from common.wire import PROTOCOL_VERSION, Hello, Limits
from executor_svc.kv_cache import block_bytes
from executor_svc.link import FatalError, Link, LinkOptions, RefusedError, install_signal_handlers
from executor_svc.model import LoadedModel, ModelError, load_model
from executor_svc.runner import Runner
from executor_svc.settings import ExecutorSettings
from executor_svc.warm_up import WarmUpError, warm_up

log = structlog.get_logger()
GIB = 1 << 30


class StartError(Exception):
    """The executor cannot start; the text is one plain line."""


def serve(settings: ExecutorSettings) -> int:
    """Run one executor until it is drained or stopped. Returns the exit status."""
    try:
        link = start(settings)
    except (StartError, ModelError, WarmUpError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    install_signal_handlers(link)
    try:
        link.run()
    except RefusedError as error:
        print(f"error: the scheduler refused this executor: {error}", file=sys.stderr)
        return 1
    except FatalError as error:
        print(f"error: the device failed: {error}", file=sys.stderr)
        return 1
    return 0


def start(settings: ExecutorSettings) -> Link:
    """Everything up to the first Hello. Raises `StartError`, `ModelError`, `WarmUpError`, OSError, ValueError."""
    dialing = settings.dialing()
    if settings.status_file is not None:
        # One that a killed predecessor left behind would say "attached" while the model loads.
        settings.status_file.unlink(missing_ok=True)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    device = pick_device(settings.device)
    loaded = load_model(
        settings.model_source,
        dtype=settings.dtype,
        device=str(device),
        max_model_len=settings.max_model_len,
        quantization=settings.quantization,
        name=settings.served_model_name or None,
    )
    card = loaded.card
    limits = make_limits(settings, loaded, device)
    runner = Runner(loaded.decoder, card, limits)
    started = time.monotonic()
    warm_up(runner)
    log.info(
        "ready to attach",
        model=card.name,
        dtype=card.dtype,
        device=str(device),
        context=card.max_model_len,
        blocks=limits.num_blocks,
        kv_tokens=limits.num_blocks * limits.block_size,
        seats=limits.max_num_seqs,
        warm_up_s=round(time.monotonic() - started, 2),
    )
    hello = Hello(
        protocol=PROTOCOL_VERSION,
        name=settings.name,
        incarnation=os.urandom(16),
        device=device_name(device),
        limits=limits,
        model=card,
    )
    options = LinkOptions(dialing, grace_s=settings.grace_s, status_file=settings.status_file)
    return Link(options, hello, runner)


def pick_device(wanted: str) -> torch.device:
    """Raises `StartError` when a GPU is asked for and there is none."""
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(wanted)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise StartError(f"device {wanted}: this machine or this torch has no GPU")
        if (device.index or 0) >= torch.cuda.device_count():
            raise StartError(f"device {wanted}: there are only {torch.cuda.device_count()}")
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    return device


def device_name(device: torch.device) -> str:
    """For people: what the executor runs on."""
    if device.type == "cuda":
        return f"{device} {torch.cuda.get_device_name(device)}"
    return f"cpu {platform.machine()} {torch.get_num_threads()} threads"


def make_limits(settings: ExecutorSettings, loaded: LoadedModel, device: torch.device) -> Limits:
    """What this executor announces. Raises `StartError` when not even one block fits."""
    bytes_each = block_bytes(loaded.decoder.config, settings.block_size, loaded.decoder.dtype)
    num_blocks = settings.num_blocks
    if num_blocks is None and settings.kv_cache_gib is None and device.type == "cuda":
        num_blocks = profile_blocks(settings, loaded, device, bytes_each)
    elif num_blocks is None:
        num_blocks = int((settings.kv_cache_gib or 1.0) * GIB) // bytes_each
    if num_blocks < 1:
        raise StartError(f"no memory for KV blocks of {bytes_each} bytes")
    return _limits(settings, num_blocks, settings.num_host_blocks)


def _limits(settings: ExecutorSettings, num_blocks: int, num_host_blocks: int) -> Limits:
    return Limits(
        block_size=settings.block_size,
        num_blocks=min(num_blocks, 0x7FFF_FFFF),
        num_host_blocks=num_host_blocks,
        max_num_seqs=min(settings.max_num_seqs, settings.max_num_batched_tokens),
        max_num_batched_tokens=settings.max_num_batched_tokens,
    )


def profile_blocks(settings: ExecutorSettings, loaded: LoadedModel, device: torch.device, bytes_each: int) -> int:
    """Blocks for the GPU memory that is left beside the weights and the largest iteration."""
    needed = -(-settings.max_num_batched_tokens // settings.block_size) + settings.max_num_seqs
    trial = Runner(loaded.decoder, loaded.card, _limits(settings, needed, 0))
    torch.cuda.reset_peak_memory_stats(device)
    warm_up(trial)
    peak = torch.cuda.max_memory_allocated(device) - needed * bytes_each
    del trial
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    # What other processes hold, and what the driver and the kernels take outside of torch's allocator.
    elsewhere = total - free - torch.cuda.memory_reserved(device)
    left = int(total * settings.gpu_memory_utilization) - elsewhere - peak
    log.info("GPU memory", total_gib=total / GIB, peak_gib=round(peak / GIB, 2), kv_gib=round(left / GIB, 2))
    return left // bytes_each
