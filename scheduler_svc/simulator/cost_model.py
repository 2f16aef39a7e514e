"""How long an iteration takes: non-negative linear pieces over its features, of which the largest counts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from scheduler_svc.simulator.iteration import FEATURES

FORMAT = "gilir-cost-model-1"


class CostModelError(Exception):
    """A cost model file that cannot be used. The text names the file and the field."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of an iteration = the maximum over `pieces` of the sum of coefficient times feature, plus `overhead_s`.

    One piece is a linear model; two are a roofline: what memory traffic bounds and what arithmetic bounds.
    """

    name: str
    pieces: tuple[tuple[float, ...], ...]
    """Coefficients in seconds per unit of the feature, in the order of `FEATURES`."""
    overhead_s: float = 0.0
    """Seconds between two iterations of a lane: the wire, the scheduler, whatever the samples left out."""
    request_s: float = 0.0
    """Seconds that a client waits beside iterations: HTTP, tokenizing, the frontend."""
    fit: Mapping[str, Any] = field(default_factory=dict)
    """Where the coefficients come from, and how far off they are."""
    executor: Mapping[str, int] = field(default_factory=dict)
    """What the executor behind it can hold: `blocks`, `block_size`, `seats`, where known."""

    def seconds(
        self,
        decodes: float,
        prefill_tokens: float,
        decode_context: float,
        prefill_attention: float,
        swapped_blocks: float,
    ) -> float:
        """Duration of an iteration, without the overhead."""
        longest = 0.0
        for fixed, per_decode, per_token, per_context, per_attention, per_block in self.pieces:
            value = (
                fixed
                + per_decode * decodes
                + per_token * prefill_tokens
                + per_context * decode_context
                + per_attention * prefill_attention
                + per_block * swapped_blocks
            )
            longest = max(longest, value)
        return longest

    def to_json(self) -> str:
        """The file's content."""
        content = {
            "format": FORMAT,
            "name": self.name,
            "pieces": [dict(zip(FEATURES, piece, strict=True)) for piece in self.pieces],
            "overhead_s": self.overhead_s,
            "request_s": self.request_s,
            "executor": dict(self.executor),
            "fit": dict(self.fit),
        }
        return json.dumps(content, indent=2) + "\n"


def presets() -> list[str]:
    """Names of the cost models that come with the package."""
    return sorted(
        entry.name.removesuffix(".json") for entry in _preset_folder().iterdir() if entry.name[-5:] == ".json"
    )


def load(source: str) -> CostModel:
    """A preset by its name, or a file by its path. Raises `CostModelError`."""
    if source in presets():
        return parse((_preset_folder() / f"{source}.json").read_text(), source)
    try:
        text = Path(source).read_text()
    except OSError as error:
        known = ", ".join(presets())
        raise CostModelError(f"{source}: neither a preset ({known}) nor a readable file: {error.strerror}") from None
    except UnicodeDecodeError:
        raise CostModelError(f"{source}: not a text file") from None
    return parse(text, source)


def parse(text: str, source: str) -> CostModel:
    """Read a cost model's JSON. Raises `CostModelError`."""
    try:
        content = json.loads(text)
    except ValueError as error:
        raise CostModelError(f"{source}: not JSON: {error}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CostModelError(f"{source}: format: expected {FORMAT!r}")
    pieces = content.get("pieces")
    if not isinstance(pieces, list) or not pieces:
        raise CostModelError(f"{source}: pieces: expected a list with at least one object")
    return CostModel(
        name=str(content.get("name", source)),
        pieces=tuple(_piece(piece, f"{source}: pieces[{i}]") for i, piece in enumerate(pieces)),
        overhead_s=_number(content.get("overhead_s", 0.0), f"{source}: overhead_s"),
        request_s=_number(content.get("request_s", 0.0), f"{source}: request_s"),
        fit=_object(content.get("fit", {}), f"{source}: fit"),
        executor=_object(content.get("executor", {}), f"{source}: executor"),
    )


def _piece(raw: object, path: str) -> tuple[float, ...]:
    piece = _object(raw, path)
    unknown = piece.keys() - set(FEATURES)
    if unknown:
        raise CostModelError(f"{path}: unknown feature {sorted(unknown)[0]!r}; there are {', '.join(FEATURES)}")
    return tuple(_number(piece.get(name, 0.0), f"{path}.{name}") for name in FEATURES)


def _number(raw: object, path: str) -> float:
    if isinstance(raw, bool) or not isinstance(raw, int | float) or not math.isfinite(raw) or raw < 0:
        raise CostModelError(f"{path}: expected a number of at least 0, got {raw!r}")
    return float(raw)


def _object(raw: object, path: str) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise CostModelError(f"{path}: expected an object, got {raw!r}")
    return raw


def _preset_folder() -> Any:
    return files("scheduler_svc.simulator") / "presets"
