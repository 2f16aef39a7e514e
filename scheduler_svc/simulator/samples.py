"""Reads measured iterations from a plan log."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scheduler_svc.simulator.iteration import IterationSample, chunk_attention


class LogError(Exception):
    """A plan log that cannot be read. The text names the file and the line."""


def iterations(path: Path) -> Iterator[IterationSample]:
    """Each acknowledged iteration of a plan log, in order. Raises `LogError`.

    Contexts are added up from the rows, so a sequence that began from cached blocks seems shorter than it is.
    """
    known: dict[str, int] = {}
    pending: dict[tuple[int, int], _Planned] = {}
    try:
        with path.open() as file:
            for number, line in enumerate(file, start=1):
                try:
                    entry = json.loads(line)
                    key = int(entry["epoch"]), int(entry["iteration"])
                    if "decodes" in entry:
                        pending[key] = _plan(entry, known)
                    elif key in pending:
                        yield pending.pop(key).sample(float(entry["t"]))
                except (ValueError, KeyError, TypeError):
                    raise LogError(f"{path}: line {number}: not an entry of a plan log") from None
    except OSError as error:
        raise LogError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise LogError(f"{path}: not a text file") from None


@dataclass(slots=True)
class _Planned:
    start: float
    decodes: int
    prefill_tokens: int
    decode_context: int
    prefill_attention: int

    def sample(self, end: float) -> IterationSample:
        work = (self.decodes, self.prefill_tokens, self.decode_context, self.prefill_attention)
        return IterationSample(*work, swapped_blocks=0, seconds=end - self.start)


def _plan(entry: dict[str, Any], known: dict[str, int]) -> _Planned:
    """Read a plan; `known` holds the computed tokens of each sequence."""
    planned = _Planned(float(entry["t"]), len(entry["decodes"]), 0, 0, 0)
    for _, name in entry["decodes"]:
        known[name] = known.get(name, 0) + 1
        planned.decode_context += known[name]
    for _, name, chunk in entry["prefills"]:
        before = known.get(name, 0)
        planned.prefill_tokens += chunk
        planned.prefill_attention += chunk_attention(before, chunk)
        known[name] = before + chunk
    return planned
