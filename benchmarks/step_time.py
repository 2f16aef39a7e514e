"""How long the executor's steps take, against the floor that memory and arithmetic set.

    python -m benchmarks.step_time [--shape smollm2-135m] [--device cuda] [--dtype bfloat16] [--cpu-step torch] [--full]

The executor's own `Runner` runs plans on a model of the given shape with random weights: all that an iteration does on
the executor's side, the sampler included, without sockets. Prompts are random; a decode's context is not computed but
taken as cached, and its blocks hold random values.

The floor is the higher of two: the bytes that the step must move (all weights, and the keys and values that its rows
attend to) over the bandwidth at which this machine reads memory, and its floating-point operations over the rate of the
best matrix product. Both rates are measured between the rounds, and the best seen counts. The cases take turns; given
are the fastest step and the median. A model that fits into the caches can be below the floor by memory.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from typing import Any

from common.logs import configure_logs
from executor_svc.determinism import prepare_environment

DEFAULT_BATCHES, DEFAULT_CONTEXTS = [1, 8, 32], [256]
FULL_BATCHES, FULL_CONTEXTS = [1, 2, 4, 8, 16, 32, 64, 128, 256], [128, 512, 2048, 8192, 32_768]
FULL_PREFILLS = [128, 512, 2048, 8192]
GIB = 1 << 30


def numbers(text: str) -> list[int]:
    found = [int(part) for part in text.split(",") if part]
    if any(number < 1 for number in found):
        raise argparse.ArgumentTypeError("must be positive")
    return found


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="smollm2-135m", help="%(default)s, llama-3.1-8b, gemma-3-270m or embedded")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--cpu-step", choices=("native", "torch"), default="native")
    parser.add_argument("--kv-cache-dtype", default="auto", choices=("auto", "fp8"))
    parser.add_argument("--no-cuda-graphs", dest="cuda_graphs", action="store_false")
    parser.add_argument("--threads", type=int, help="of the CPU; none: one a core")
    parser.add_argument("--batches", type=numbers, help="of the decodes, with commas between")
    parser.add_argument("--contexts", type=numbers, help="tokens of each decode's context")
    parser.add_argument("--prefills", type=numbers, help="tokens of a single prompt")
    parser.add_argument("--full", action="store_true", help="batches to 256, contexts to 32k, prefills to 8k")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="decodes of a round")
    parser.add_argument("--kv-gib", type=float, default=4.0, help="leave out cases that need more (%(default)s)")
    parser.add_argument("--json", action="store_true", help="one object a line")
    options = parser.parse_args(arguments)
    if options.batches is None:
        options.batches = FULL_BATCHES if options.full else DEFAULT_BATCHES
    if options.contexts is None:
        options.contexts = FULL_CONTEXTS if options.full else DEFAULT_CONTEXTS
    if options.prefills is None:
        options.prefills = FULL_PREFILLS if options.full else []
    return options


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure; one record a case. Raises ValueError for an unknown shape and where no case fits."""
    import torch  # after the environment is prepared

    from benchmarks import rates, shapes
    from executor_svc.kv_cache import FP8

    steps = importlib.import_module("benchmarks.steps")
    if options.shape not in shapes.NAMES:
        raise ValueError(f"shape {options.shape!r} is not one of {', '.join(shapes.NAMES)}")
    if options.threads:
        torch.set_num_threads(options.threads)
    cases = [steps.Case("decode", batch, context) for context in options.contexts for batch in options.batches]
    cases += [steps.Case("prefill", 1, tokens) for tokens in options.prefills]
    config = shapes.read_shape(options.shape, options.dtype, 1024)
    kv_dtype = config.dtype if options.kv_cache_dtype == "auto" else FP8
    fitting = [case for case in cases if steps.kv_bytes(config, case, options.steps, kv_dtype) <= options.kv_gib * GIB]
    for case in cases:
        if case not in fitting:
            print(f"left out: {case.kind} {case.batch} x {case.context}: its KV cache is too large", file=sys.stderr)
    if not fitting:
        raise ValueError("no case fits into kv-gib")
    model = steps.Model(
        shape=options.shape,
        dtype=options.dtype,
        device=options.device,
        cpu_step=options.cpu_step,
        kv_cache_dtype=options.kv_cache_dtype,
        cuda_graphs=options.cuda_graphs,
    )
    bench = steps.Bench(model, fitting, options.steps)
    with rates.RateMeter(options.device, options.dtype, torch.get_num_threads()) as meter:
        took = steps.measure(bench, fitting, options.rounds, meter.measure)
        best = meter.best
    common = {"shape": options.shape, "device": options.device, "cpu_step": options.cpu_step}
    lines = [steps.summary(bench, case, times, best) for case, times in zip(fitting, took, strict=True)]
    return [common | line for line in lines]


def table(lines: list[dict[str, Any]]) -> str:
    first = lines[0]
    head = f"{first['shape']}, {first['dtype']}, {first['device']}: reads {first['bandwidth_gb_s']:.1f} GB/s, "
    head += f"multiplies {first['matmul_gflop_s']:.0f} GFLOP/s\n"
    head += (
        f"{'':<8}{'batch':>6}{'context':>9}{'ms min':>10}{'median':>10}{'floor':>10}{'ratio':>7}  by memory, arithmetic"
    )
    rows = [
        f"{line['kind']:<8}{line['batch']:>6}{line['context']:>9}{line['ms_min']:>10.3f}{line['ms_median']:>10.3f}"
        f"{line['floor_ms']:>10.3f}{line['ratio']:>7.2f}  {line['memory_floor_ms']:.3f}, {line['compute_floor_ms']:.3f}"
        for line in lines
    ]
    return "\n".join([head, *rows])


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    prepare_environment()
    configure_logs("step_time")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        lines = run(options)
    except (ValueError, AssertionError) as error:  # AssertionError: a torch without CUDA
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("\n".join(json.dumps(line) for line in lines) if options.json else table(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
