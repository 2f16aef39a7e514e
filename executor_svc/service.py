"""Start of an executor: load the model, size the KV cache, warm up, attach."""

from __future__ import annotations

import gc
import os
import platform
import sys
import time

import structlog
import torch
import zmq

from common.wire import PROTOCOL_VERSION, Hello, Limits, TransferPoint
from common.wire.handover import MAX_CHUNK_BYTES
from executor_svc.determinism import VARIABLE
from executor_svc.faults import FatalError
from executor_svc.graphs import CudaGraphs, Eager, Recorder
from executor_svc.handover import Exchange, TransferSocket
from executor_svc.handover.kv_blocks import KvBlocks
from executor_svc.host_blocks import BLOCKS_AT_ONCE
from executor_svc.kernel_cache import prepare_kernel_cache
from executor_svc.kv_cache import FP8, block_bytes
from executor_svc.link import Link, LinkOptions, RefusedError
from executor_svc.model import Decoder, LoadedModel, ModelError, NativeDecoder, load_model
from executor_svc.runner import Runner
from executor_svc.settings import ExecutorSettings
from executor_svc.signals import install_signal_handlers
from executor_svc.warm_up import WarmUpError, warm_up, warm_up_graphs

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
    dialing, transfer = settings.dialing(), settings.transfer_socket()
    if settings.status_file is not None:
        # One that a killed predecessor left behind would say "attached" while the model loads.
        settings.status_file.unlink(missing_ok=True)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    device = pick_device(settings.device)
    if device.type == "cuda":
        prepare_kernel_cache()
    check_kv_cache_dtype(settings, device)
    loaded = load_model(
        settings.model_source,
        dtype=settings.dtype,
        device=str(device),
        max_model_len=settings.max_model_len,
        quantization=settings.quantization,
        name=settings.served_model_name or None,
        kv_cache_dtype=settings.kv_cache_dtype,
        cpu_step=settings.cpu_step,
        batch_invariant=settings.batch_invariant,
    )
    if settings.batch_invariant:
        check_batch_invariant(loaded.decoder)
    card = loaded.card
    limits = make_limits(settings, loaded, device)
    runner = make_runner(settings, loaded, limits, device)
    started = time.monotonic()
    warm_up(runner)
    graphs = warm_up_graphs(runner)
    log.info(
        "ready to attach",
        model=card.name,
        dtype=card.dtype,
        device=str(device),
        context=card.max_model_len,
        blocks=limits.num_blocks,
        kv_tokens=limits.num_blocks * limits.block_size,
        seats=limits.max_num_seqs,
        graphs=graphs,
        warm_up_s=round(time.monotonic() - started, 2),
    )
    exchange = make_exchange(transfer, runner)
    hello = Hello(
        protocol=PROTOCOL_VERSION,
        name=settings.name,
        incarnation=os.urandom(16),
        device=device_name(device),
        limits=limits,
        model=card,
        spare=settings.spare,
        transfer=TransferPoint() if exchange is None else exchange.point,
    )
    options = LinkOptions(dialing, grace_s=settings.grace_s, status_file=settings.status_file)
    return Link(options, hello, runner, exchange)


def make_exchange(transfer: TransferSocket | None, runner: Runner) -> Exchange | None:
    """What takes part in hand-overs, not started; None where that is not wanted. Raises `StartError`."""
    if transfer is None:
        return None
    blocks = KvBlocks(runner.cache)
    if blocks.block_bytes > MAX_CHUNK_BYTES:
        log.info("no hand-overs: the KV blocks are too large", block_bytes=blocks.block_bytes)
        return None
    try:
        return Exchange(transfer, blocks)
    except zmq.ZMQError as error:
        raise StartError(f"transfer-bind {transfer.bind}: {error}") from None


def check_batch_invariant(decoder: Decoder | NativeDecoder) -> None:
    """Raises `StartError` where torch's products on this CPU make a row's bits depend on its company."""
    if isinstance(decoder, NativeDecoder) or decoder.device.type != "cpu":
        return
    kinds = {(linear.weight.dtype, linear.weight.shape): linear for linear in decoder.weights.products()}
    for (dtype, shape), linear in kinds.items():
        if not linear.keeps_rows_apart():
            setting = os.environ.get(VARIABLE, "")
            raise StartError(
                f"batch-invariant: with cpu-step torch and {VARIABLE}={setting!r}, products of {dtype} weights "
                f"{list(shape)} depend on the batch on this machine: leave {VARIABLE} unset, or take cpu-step native"
            )


def pick_device(wanted: str) -> torch.device:
    """`auto:N` is the GPU of that number where there are any. Raises `StartError` for a GPU that there is not."""
    kind, _, number = wanted.partition(":")
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise StartError(f"device {wanted}: this machine or this torch has no GPU")
    index, num_gpus = int(number or 0), torch.cuda.device_count()
    if index >= num_gpus:
        raise StartError(
            f"device {wanted}: GPUs are numbered from 0, and there are {num_gpus}; executors that are to share one "
            "need its device and kv-cache-gib each"
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def device_name(device: torch.device) -> str:
    """For people: what the executor runs on."""
    if device.type == "cuda":
        return f"{device} {torch.cuda.get_device_name(device)}"
    return f"cpu {platform.machine()} {torch.get_num_threads()} threads"


def make_runner(settings: ExecutorSettings, loaded: LoadedModel, limits: Limits, device: torch.device) -> Runner:
    """A runner as the settings want it, not warm yet. Raises `StartError`."""
    recorder: Recorder | None = None
    if device.type == "cuda":
        recorder = CudaGraphs(device) if settings.cuda_graphs else Eager()
    cache_dtype = kv_cache_dtype(settings, loaded)
    return Runner(loaded.decoder, loaded.card, limits, cache_dtype=cache_dtype, recorder=recorder)


def check_kv_cache_dtype(settings: ExecutorSettings, device: torch.device) -> None:
    """Raises `StartError` for one that the device does not have."""
    if settings.kv_cache_dtype != "auto" and device.type != "cuda":
        raise StartError(f"kv-cache-dtype {settings.kv_cache_dtype}: only a GPU has it")


def kv_cache_dtype(settings: ExecutorSettings, loaded: LoadedModel) -> torch.dtype:
    """What KV is kept in."""
    return loaded.decoder.dtype if settings.kv_cache_dtype == "auto" else FP8


def make_limits(settings: ExecutorSettings, loaded: LoadedModel, device: torch.device) -> Limits:
    """What this executor announces. Raises `StartError` when not even one block fits."""
    dtype = kv_cache_dtype(settings, loaded)
    bytes_each = block_bytes(loaded.decoder.config, settings.block_size, dtype)
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
    """Blocks for the GPU memory that is left beside the weights, the largest iteration, and the graphs."""
    needed = -(-settings.max_num_batched_tokens // settings.block_size) + settings.max_num_seqs
    host_blocks = min(settings.num_host_blocks, BLOCKS_AT_ONCE)
    trial = make_runner(settings, loaded, _limits(settings, needed, host_blocks), device)
    torch.cuda.reset_peak_memory_stats(device)
    warm_up(trial)
    peak = torch.cuda.max_memory_allocated(device) - needed * bytes_each
    # Graphs hold memory of torch's, in a pool of their own, and of the driver's.
    torch.cuda.empty_cache()
    before, _ = torch.cuda.mem_get_info(device)
    warm_up_graphs(trial)
    torch.cuda.empty_cache()
    graphs = max(0, before - torch.cuda.mem_get_info(device)[0])
    del trial
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    # What other processes hold, and what the driver and the kernels take outside of torch's allocator.
    elsewhere = total - free - torch.cuda.memory_reserved(device)
    left = int(total * settings.gpu_memory_utilization) - elsewhere - peak - graphs
    gib = {"total": total, "peak": peak, "graphs": graphs, "kv": left}
    log.info("GPU memory", **{f"{name}_gib": round(size / GIB, 2) for name, size in gib.items()})
    return left // bytes_each
