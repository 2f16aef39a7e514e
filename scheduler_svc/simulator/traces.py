"""Reads request traces, Azure 2023, Mooncake (FAST'25) and ShareGPT lengths: lengths, times, shared prefixes."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import TextIO

import numpy as np
from numpy.typing import NDArray

MOONCAKE_BLOCK = 512
"""Tokens that one of Mooncake's hash ids stands for."""
MAX_LENGTH = 1 << 22


class TraceError(Exception):
    """A trace that cannot be read. The text names the file and the line."""


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Columns by request, in order of arrival."""

    arrivals: NDArray[np.float64] | None
    """Seconds from the first; None: the trace has no times."""
    prompt_lengths: NDArray[np.int64]
    output_lengths: NDArray[np.int64]
    prefixes: list[NDArray[np.int32]] | None = None
    """For each request the ids of its prompt's pieces of `MOONCAKE_BLOCK` tokens: the same id, the same tokens."""


@dataclass(slots=True)
class _Row:
    time: float | None
    prompt: int
    output: int
    prefix: NDArray[np.int32] | None = None


class _LineError(ValueError):
    """What is wrong with a line."""


def read(path: Path, limit: int | None = None, layout: str = "auto") -> Trace:
    """The first `limit` requests of a trace file. `layout`: a key of `LAYOUTS`, or `auto` to go by the first line.

    Raises `TraceError`.
    """
    try:
        with path.open(newline="") as file:
            first = file.readline()
            name = _recognise(first, path) if layout == "auto" else layout
            file.seek(0)
            rows = list(islice(LAYOUTS[name](file, path), limit))
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise TraceError(f"{path}: not a text file") from None
    if not rows:
        raise TraceError(f"{path}: holds no requests")
    return _columns(rows)


def _columns(rows: list[_Row]) -> Trace:
    times = None
    if rows[0].time is not None:
        times = np.array([row.time for row in rows], np.float64)
        order = np.argsort(times, kind="stable")
        rows, times = [rows[i] for i in order], times[order] - times[order[0]]
    return Trace(
        times,
        np.array([row.prompt for row in rows], np.int64),
        np.array([row.output for row in rows], np.int64),
        [row.prefix for row in rows if row.prefix is not None] if rows[0].prefix is not None else None,
    )


def _recognise(first: str, path: Path) -> str:
    if first.startswith("{"):
        return "mooncake"
    columns = {name.strip() for name in first.split(",")}
    for name, wanted in (("azure", AZURE_COLUMNS), ("sharegpt", SHAREGPT_COLUMNS)):
        if set(wanted) <= columns:
            return name
    raise TraceError(f"{path}: line 1: unknown format; known ones: {', '.join(LAYOUTS)} (choose with --format)")


AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
SHAREGPT_COLUMNS = ("num_prefill_tokens", "num_decode_tokens")


def _read_csv(file: TextIO, path: Path, wanted: tuple[str, ...]) -> Iterator[tuple[int, list[str]]]:
    """(line number, values of the wanted columns) of each row."""
    lines = csv.reader(file)
    header = [name.strip() for name in next(lines, [])]
    missing = [name for name in wanted if name not in header]
    if missing:
        raise TraceError(f"{path}: line 1: no column {missing[0]!r}")
    places = [header.index(name) for name in wanted]
    for row in lines:
        if not row:
            continue
        if len(row) != len(header):
            raise TraceError(f"{path}: line {lines.line_num}: {len(row)} values for {len(header)} columns")
        yield lines.line_num, [row[place] for place in places]


def _azure(file: TextIO, path: Path) -> Iterator[_Row]:
    """https://github.com/Azure/AzurePublicDataset: TIMESTAMP,ContextTokens,GeneratedTokens."""
    for number, (time, prompt, output) in _read_csv(file, path, AZURE_COLUMNS):
        try:
            yield _Row(_timestamp(time), _length(prompt, "ContextTokens"), _length(output, "GeneratedTokens"))
        except _LineError as error:
            raise TraceError(f"{path}: line {number}: {error}") from None


def _sharegpt(file: TextIO, path: Path) -> Iterator[_Row]:
    """Lengths of ShareGPT conversations, as Sarathi-Serve publishes them."""
    for number, (prompt, output) in _read_csv(file, path, SHAREGPT_COLUMNS):
        try:
            yield _Row(None, _length(prompt, SHAREGPT_COLUMNS[0]), _length(output, SHAREGPT_COLUMNS[1]))
        except _LineError as error:
            raise TraceError(f"{path}: line {number}: {error}") from None


def _mooncake(file: TextIO, path: Path) -> Iterator[_Row]:
    """https://github.com/kvcache-ai/Mooncake: one JSON object a line, times in milliseconds."""
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            yield _mooncake_row(line)
        except _LineError as error:
            raise TraceError(f"{path}: line {number}: {error}") from None


def _mooncake_row(line: str) -> _Row:
    try:
        content = json.loads(line)
    except ValueError:
        raise _LineError("not a JSON object") from None
    if not isinstance(content, dict):
        raise _LineError("not a JSON object")
    time, ids = content.get("timestamp"), content.get("hash_ids")
    if isinstance(time, bool) or not isinstance(time, int | float) or not time >= 0:
        raise _LineError(f"timestamp: expected milliseconds, got {time!r}")
    prompt = _length(content.get("input_length"), "input_length")
    output = _length(content.get("output_length"), "output_length")
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 1 << 23 for i in ids):
        raise _LineError("hash_ids: expected a list of whole numbers")
    if len(ids) * MOONCAKE_BLOCK < prompt:
        raise _LineError(f"hash_ids: {len(ids)} blocks of {MOONCAKE_BLOCK} do not hold {prompt} tokens")
    return _Row(time / 1000, prompt, output, np.array(ids, np.int32))


def _length(raw: object, name: str) -> int:
    """A number of tokens. Traces hold a few empty answers and prompts; those count as one token."""
    try:
        value = int(str(raw))
    except ValueError:
        raise _LineError(f"{name}: expected a whole number, got {raw!r}") from None
    if not 0 <= value <= MAX_LENGTH:
        raise _LineError(f"{name}: {value} is out of range")
    return max(value, 1)


def _timestamp(text: str) -> float:
    """Seconds. The trace has seven digits after the point, `datetime` reads six."""
    whole, _, fraction = text.partition(".")
    try:
        seconds = (datetime.fromisoformat(whole) - datetime(2000, 1, 1)).total_seconds()
        return seconds + float(f"0.{fraction or 0}")
    except (ValueError, TypeError):
        raise _LineError(f"TIMESTAMP: expected YYYY-MM-DD HH:MM:SS, got {text!r}") from None


LAYOUTS: dict[str, Callable[[TextIO, Path], Iterator[_Row]]] = {
    "azure": _azure,
    "mooncake": _mooncake,
    "sharegpt": _sharegpt,
}
