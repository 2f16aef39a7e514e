"""What a mate under a grammar costs a batch of rows without one.

    python -m benchmarks.structured [--shape smollm2-135m] [--device cuda] [--dtype bfloat16] [--batch 8]

Decodes of the executor's own `Runner` on random weights, over a made-up vocabulary of the model's size. Three kinds of
step follow each other in turn: a batch of free rows alone, with one more free row, and with one more row under a JSON
schema. Given are the medians of each kind, and of the ratios of neighbours: of the last two what the grammar costs, of
the first two what any more row costs.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import tokenizers

from common.logs import configure_logs
from common.wire import Constraint, FinishCode, Language, Limits, NewSequence, Plan, Result, SamplingParams
from common.wire.constraint import UNBOUND
from executor_svc.determinism import prepare_environment

if TYPE_CHECKING:
    from executor_svc.runner import Runner

ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "kind": {"enum": ["cat", "dog"]},
        "age": {"type": "integer"},
    },
    "required": ["name", "kind", "age"],
}
SCHEMA = json.dumps({"type": "array", "items": ITEM, "minItems": 1000})
"""Longer than any turn."""
CASES = ("alone", "free mate", "bound mate")
BLOCK_SIZE, CONTEXT, WARM_UP = 16, 64, 5


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="smollm2-135m", help="%(default)s, llama-3.1-8b, gemma-3-270m or embedded")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--threads", type=int, help="of the CPU; none: one a core")
    parser.add_argument("--batch", type=int, default=8, help="free rows")
    parser.add_argument("--steps", type=int, default=200, help="of each kind")
    return parser.parse_args(arguments)


def made_up_tokenizer(vocab_size: int) -> bytes:
    """Whole pieces of one to six letters and digits, and what JSON is written with; token 0 ends a text."""
    draw = random.Random(0)
    marks = [*'{}[]:,"-. ', '{"', '":', '",', "\n", *"0123456789abcdefghijklmnopqrstuvwxyz"]
    pieces = dict.fromkeys(["<end>", *marks])
    while len(pieces) < vocab_size:
        word = "".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randrange(2, 7)))
        pieces[draw.choice(["", " "]) + word] = None
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({piece: i for i, piece in enumerate(list(pieces)[:vocab_size])}, unk_token="a")
    )
    made.add_special_tokens([tokenizers.AddedToken("<end>", special=True)])
    return made.to_str().encode()


def run(options: argparse.Namespace) -> dict[str, list[float]]:
    """Milliseconds of the steps of each case."""
    import torch  # after the environment is prepared

    from benchmarks import shapes
    from executor_svc.model import LoadedModel
    from executor_svc.service import make_runner
    from executor_svc.settings import ExecutorSettings
    from executor_svc.warm_up import warm_up, warm_up_graphs

    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    length = CONTEXT + 3 * (options.steps + WARM_UP) + 16
    config = shapes.read_shape(options.shape, options.dtype, length)
    loaded, _ = shapes.load_random(config, device, "native", "auto")
    files = {"tokenizer.json": made_up_tokenizer(config.vocab_size)}
    loaded = LoadedModel(loaded.decoder, replace(loaded.card, tokenizer_files=files, eos_ids=(0,)))
    each = -(-length // BLOCK_SIZE)
    rows = options.batch + 2
    limits = Limits(BLOCK_SIZE, rows * each, 0, rows, rows * CONTEXT)
    runner = make_runner(ExecutorSettings(), loaded, limits, device)
    warm_up(runner)
    warm_up_graphs(runner)
    return measure(runner, options.batch, each, options.steps)


def measure(runner: Runner, batch: int, blocks: int, steps: int) -> dict[str, list[float]]:
    """The free rows are in the slots 0 … batch - 1, behind them the free mate and the bound one."""
    free, mate, bound = np.arange(batch, dtype=np.uint16), np.uint16(batch), np.uint16(batch + 1)
    rows = {"alone": free, "free mate": np.append(free, mate), "bound mate": np.append(free, bound)}
    everybody = np.arange(batch + 2, dtype=np.uint16)
    lengths = np.full(batch + 2, CONTEXT, np.int32)
    new = sequences(batch, blocks, runner.state.vocab_size)
    result = step(runner, Plan(0, 1, prefills=everybody, prefill_lengths=lengths, new=new))
    iteration = 1
    while FinishCode.NOT_READY in result.finish:  # the last token of its prompt stays until the grammar is there
        iteration += 1
        result = step(runner, Plan(0, iteration, prefills=np.array([bound]), prefill_lengths=np.ones(1, np.int32)))
    found: dict[str, list[float]] = {case: [] for case in CASES}
    gc.collect()
    gc.freeze()
    for number in range(steps + WARM_UP):
        for case in CASES:
            iteration += 1
            started = time.perf_counter()
            result = step(runner, Plan(0, iteration, decodes=rows[case]))
            took = 1000 * (time.perf_counter() - started)
            if result.finish.any():
                raise RuntimeError(f"a row has ended: {result.finish.tolist()}")
            if number >= WARM_UP:
                found[case].append(took)
    return found


def sequences(batch: int, blocks: int, vocab_size: int) -> tuple[NewSequence, ...]:
    draw = np.random.default_rng(7)
    made = []
    for slot in range(batch + 2):
        bound = slot == batch + 1
        constraint = Constraint(Language.JSON_SCHEMA, SCHEMA) if bound else UNBOUND
        params = SamplingParams(1 << 20, temperature=1.0, seed=slot, ignore_eos=not bound, constraint=constraint)
        tokens = draw.integers(1, vocab_size, CONTEXT).astype(np.int32)
        table = np.arange(slot * blocks, (slot + 1) * blocks, dtype=np.int32)
        made.append(NewSequence(slot, 1, tokens, CONTEXT, 0, table, params))
    return tuple(made)


def step(runner: Runner, plan: Plan) -> Result:
    answer = runner.run(plan)
    if not isinstance(answer, Result):
        raise RuntimeError(f"the step failed: {answer.message}")
    return answer


def ratio(one: list[float], other: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(one, other, strict=True))


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    prepare_environment()
    configure_logs("structured")
    took = run(options)
    line = {f"{case} ms": round(statistics.median(took[case]), 4) for case in CASES}
    line["a bound row to a free one"] = round(ratio(took["bound mate"], took["free mate"]), 4)
    line["any more row to none"] = round(ratio(took["free mate"], took["alone"]), 4)
    print(json.dumps({"shape": options.shape, "device": options.device, "batch": options.batch, **line}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
