"""Fits the simulator's preset `yi-34b-2xa100` to the measurements that Sarathi-Serve (OSDI'24) published.

    python benchmarks/simulator_presets.py FOLDER scheduler_svc/simulator/presets/yi-34b-2xa100.json

FOLDER holds `figure-2_decode.csv`, `figure-2_prefill.csv`, `figure-9_chunking-overhead.csv` and `table-2_results.csv`
(microsoft/sarathi-serve, branch osdi-sarathi-serve, osdi-experiments). All of them: Yi-34B on two A100 80GB PCIe.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import numpy as np

from scheduler_svc.simulator.cost_model import CostModel
from scheduler_svc.simulator.fitting import Floats, errors, fit_linear, fit_roofline, predict
from scheduler_svc.simulator.iteration import FEATURES, chunk_attention

DECODE_CONTEXT = 1022
"""Tokens of a decoding sequence in figure 2: prompts of 1020, answers of 4. In table 2: 1024 and 16."""
KV_BYTES_PER_TOKEN = 60 * 2 * 8 * 128 * 2
"""Layers, keys and values, KV heads, head width, bytes of bf16."""
KV_BYTES = (2 * 80e9) * 0.9 - 34.4e9 * 2 - 4e9
"""Of two devices at 90 %, less the weights and the activations."""
BLOCK_SIZE = 16


def rows(folder: Path) -> list[tuple[str, tuple[float, ...], float]]:
    """(what, features, seconds) of each measurement; a series of chunks counts as its mean iteration."""
    found: list[tuple[str, tuple[float, ...], float]] = []
    for row in _read(folder / "figure-2_decode.csv"):
        count, seconds = int(row["batch_size"].split(".")[0]), float(row["batch_execution_time"])
        found.append((f"figure 2, {count} decodes", (1, count, 0, count * DECODE_CONTEXT, 0, 0), seconds))
    for row in _read(folder / "figure-2_prefill.csv"):
        tokens, seconds = int(row["batch_num_tokens"]), float(row["batch_execution_time"])
        found.append((f"figure 2, prefill of {tokens}", (1, 0, tokens, 0, chunk_attention(0, tokens), 0), seconds))
    for row in _read(folder / "figure-9_chunking-overhead.csv"):
        length, chunk = int(row["prefill_length"]), int(row["chunk_size"])
        chunks = -(-length // chunk)
        work = (1, 0, length / chunks, 0, chunk_attention(0, length) / chunks, 0)
        seconds = float(row["prefill_execution_time"]) / 1000 / chunks
        found.append((f"figure 9, {length} in chunks of {chunk}", work, seconds))
    for row in _read(folder / "table-2_results.csv"):
        decodes, tokens = int(row["batch_num_decode_tokens"]), int(row["batch_num_prefill_tokens"])
        work = (1, decodes, tokens, decodes * 1032, chunk_attention(0, tokens), 0)
        found.append((f"table 2, {decodes} + {tokens}", work, float(row["batch_execution_time"]) / 1000))
    return found


def _read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def leave_one_out(fitter: Any, features: Floats, seconds: Floats) -> Floats:
    """Relative error of each measurement when it is predicted from all others."""
    found = []
    for i in range(len(seconds)):
        others = np.arange(len(seconds)) != i
        pieces = np.atleast_2d(fitter(features[others], seconds[others]))
        found.append(errors(pieces, features[i : i + 1], seconds[i : i + 1])[0])
    return np.array(found)


def main() -> int:
    folder, output = Path(sys.argv[1]), Path(sys.argv[2])
    measured = rows(folder)
    features = np.array([work for _, work, _ in measured], np.float64)
    seconds = np.array([duration for _, _, duration in measured])
    candidates = {"linear": fit_linear, "the maximum of two linear pieces": fit_roofline}
    outside = {name: leave_one_out(fitter, features, seconds) for name, fitter in candidates.items()}
    for name, error in outside.items():
        print(f"{name}: median {np.median(error):.1%}, p90 {np.quantile(error, 0.9):.1%}")
    shape = min(outside, key=lambda name: float(np.mean(outside[name])))
    pieces = np.atleast_2d(candidates[shape](features, seconds))
    for (what, _, duration), guess in zip(measured, predict(pieces, features), strict=True):
        print(f"{what:36} measured {1000 * duration:8.1f} ms, model {1000 * guess:8.1f} ms")
    inside = errors(pieces, features, seconds)
    model = CostModel(
        name="yi-34b-2xa100",
        pieces=tuple(tuple(float(f"{value:.6g}") for value in piece) for piece in pieces),
        fit={
            "source": "Sarathi-Serve (OSDI'24), artifact figures 2 and 9 and table 2: Yi-34B, bf16, on two"
            " A100 80GB PCIe with tensor parallelism, in Sarathi-Serve's own engine of 2024",
            "shape": shape,
            "samples": len(measured),
            "median_error": round(float(np.median(inside)), 4),
            "p90_error": round(float(np.quantile(inside, 0.9)), 4),
            "left_out_median_error": round(float(np.median(outside[shape])), 4),
            "left_out_p90_error": round(float(np.quantile(outside[shape], 0.9)), 4),
            "note": "errors are relative; left_out: each measurement predicted from all others. All decodes were"
            " measured at a context of about 1,022 tokens, so what a row costs by itself and by its context cannot be"
            " told apart; the fit puts all of it on the context. Swaps were not measured and cost nothing here.",
        },
        executor={"block_size": BLOCK_SIZE, "blocks": int(KV_BYTES / KV_BYTES_PER_TOKEN / BLOCK_SIZE), "seats": 256},
    )
    output.write_text(model.to_json())
    print(", ".join(FEATURES), *model.pieces, sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
