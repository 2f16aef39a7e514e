"""Typed reading of a JSON object's fields, with errors that name the file and the field."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from executor_svc.model.errors import ModelError


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises `ModelError` when it cannot be read or is something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: expected a JSON object")
    return value


class Fields:
    """A JSON object read field by field. An absent field is its default; `null` is None, whatever the default."""

    def __init__(self, raw: Mapping[str, Any], where: str, defaults: Mapping[str, Any] | None = None) -> None:
        self.raw, self.where = raw, where
        self._defaults = defaults or {}
        self.read: set[str] = set()
        """Names asked for so far."""

    def get(self, name: str) -> Any:
        """The value as it is, or the default, or None."""
        self.read.add(name)
        return self.raw[name] if name in self.raw else self._defaults.get(name)

    def given(self, name: str) -> bool:
        """Whether the field is there (`null` counts)."""
        return name in self.raw

    def error(self, name: str, problem: str) -> ModelError:
        return ModelError(f"{self.where}: {name}: {problem}")

    def optional_integer(self, name: str, minimum: int = 1) -> int | None:
        value = self.get(name)
        if value is not None and (type(value) is not int or value < minimum):
            raise self.error(name, f"expected an integer of at least {minimum}, got {value!r}")
        return value

    def integer(self, name: str, minimum: int = 1) -> int:
        value = self.optional_integer(name, minimum)
        if value is None:
            raise self.error(name, "is missing")
        return value

    def optional_number(self, name: str, above: float = -math.inf) -> float | None:
        value = self.get(name)
        if value is None:
            return None
        if type(value) not in (int, float) or not math.isfinite(value) or value <= above:
            bound = "" if above == -math.inf else f" above {above:g}"
            raise self.error(name, f"expected a finite number{bound}, got {value!r}")
        return float(value)

    def number(self, name: str, above: float = -math.inf) -> float:
        value = self.optional_number(name, above)
        if value is None:
            raise self.error(name, "is missing")
        return value

    def boolean(self, name: str) -> bool:
        value = self.get(name)
        if value is None:
            return False
        if type(value) is not bool:
            raise self.error(name, f"expected true or false, got {value!r}")
        return value

    def optional_text(self, name: str) -> str | None:
        value = self.get(name)
        if value is not None and type(value) is not str:
            raise self.error(name, f"expected text, got {value!r}")
        return value

    def optional_object(self, name: str) -> dict[str, Any] | None:
        value = self.get(name)
        if value is not None and type(value) is not dict:
            raise self.error(name, f"expected an object, got {value!r}")
        return value
