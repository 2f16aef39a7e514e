"""Reading a JSON object field by field. Every mistake is a 400 that names the field; `null` equals absent."""

from __future__ import annotations

import math
from typing import Any, TypeVar

from scheduler_svc.http.errors import invalid

D = TypeVar("D")


class Fields:
    """The fields of one object. No type is coerced: a boolean is no number, `"5"` and `5.0` are no integers."""

    def __init__(self, values: dict[str, Any], path: str = "", size: int = 0) -> None:
        self._values, self._path = values, path
        self.size = size
        """Bytes of the JSON text."""
        self._read: set[str] = set()

    def path(self, name: str) -> str:
        """The name of a field as error messages give it."""
        return f"{self._path}.{name}" if self._path else name

    def raw(self, name: str) -> Any:
        """The value as it is, or None."""
        self._read.add(name)
        return self._values.get(name)

    def unknown(self) -> list[str]:
        """Names that nobody asked for."""
        return [name for name in self._values if name not in self._read]

    def integer(self, name: str, default: D, low: int, high: int) -> int | D:
        value = self.raw(name)
        return default if value is None else self.check_integer(self.path(name), value, low, high)

    def number(self, name: str, default: D, low: float, high: float, *, above: bool = False) -> float | D:
        """A finite number in [low, high], or in (low, high] if `above`."""
        value = self.raw(name)
        return default if value is None else self.check_number(self.path(name), value, low, high, above=above)

    def boolean(self, name: str, default: D) -> bool | D:
        value = self.raw(name)
        if value is None:
            return default
        if type(value) is not bool:
            raise invalid(self.path(name), f"{self.path(name)}: expected a boolean, got {show(value)}")
        return value

    def text(self, name: str, default: D, max_length: int) -> str | D:
        value = self.raw(name)
        if value is None:
            return default
        if type(value) is not str:
            raise invalid(self.path(name), f"{self.path(name)}: expected a string, got {show(value)}")
        if len(value) > max_length:
            raise invalid(self.path(name), f"{self.path(name)}: longer than {max_length} characters")
        return value

    def object(self, name: str, default: D) -> dict[str, Any] | D:
        value = self.raw(name)
        if value is None:
            return default
        if type(value) is not dict:
            raise invalid(self.path(name), f"{self.path(name)}: expected an object, got {show(value)}")
        return value

    def array(self, name: str, default: D, max_items: int) -> list[Any] | D:
        value = self.raw(name)
        if value is None:
            return default
        if type(value) is not list:
            raise invalid(self.path(name), f"{self.path(name)}: expected an array, got {show(value)}")
        if len(value) > max_items:
            raise invalid(self.path(name), f"{self.path(name)}: more than {max_items} items")
        return value

    @staticmethod
    def check_integer(path: str, value: Any, low: int, high: int) -> int:
        if type(value) is not int:
            raise invalid(path, f"{path}: expected an integer, got {show(value)}")
        if not low <= value <= high:
            raise invalid(path, f"{path}: must be in [{low}, {high}], got {show(value)}")
        return value

    @staticmethod
    def check_number(path: str, value: Any, low: float, high: float, *, above: bool = False) -> float:
        if type(value) not in (int, float) or not math.isfinite(value):
            raise invalid(path, f"{path}: expected a finite number, got {show(value)}")
        if not low <= value <= high or (above and value == low):
            raise invalid(path, f"{path}: must be in {'(' if above else '['}{low:g}, {high:g}], got {show(value)}")
        return float(value)


def show(value: Any) -> str:
    """A short rendering of a client's value."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "an array"
    text = (
        {None: "null", True: "true", False: "false"}[value] if value is None or value is True or value is False else ""
    )
    text = text or repr(value)
    return text if len(text) <= 60 else text[:60] + "…"
