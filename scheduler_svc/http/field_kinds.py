"""Fields of a request's body by name, range and default: the code that reads them and the API's document share them.

A field that is absent or null has its `default`, None where that depends on something else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from scheduler_svc.http.fields import Fields

D = TypeVar("D")
E = TypeVar("E")


@dataclass(frozen=True, slots=True)
class Integer(Generic[D]):
    """A whole number in [low, high]."""

    name: str
    default: D
    low: int
    high: int

    def read(self, fields: Fields) -> int | D:
        return fields.integer(self.name, self.default, self.low, self.high)

    def read_or(self, fields: Fields, default: E) -> int | E:
        """With another default than its own."""
        return fields.integer(self.name, default, self.low, self.high)


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number in [low, high], or in (low, high] if `above`."""

    name: str
    default: float
    low: float
    high: float
    above: bool = False

    def read(self, fields: Fields) -> float:
        return self.read_or(fields, self.default)

    def read_or(self, fields: Fields, default: float) -> float:
        """With another default than its own."""
        return fields.number(self.name, default, self.low, self.high, above=self.above)


@dataclass(frozen=True, slots=True)
class Boolean(Generic[D]):
    name: str
    default: D

    def read(self, fields: Fields) -> bool | D:
        return fields.boolean(self.name, self.default)

    def read_or(self, fields: Fields, default: bool) -> bool:
        """With another default than its own."""
        return fields.boolean(self.name, default)


@dataclass(frozen=True, slots=True)
class Text(Generic[D]):
    """At most `max_length` characters. `pattern`: what it looks like as a whole, for who reads it to check."""

    name: str
    default: D
    max_length: int
    pattern: str | None = None

    def read(self, fields: Fields) -> str | D:
        return fields.text(self.name, self.default, self.max_length)


Field = Integer[int] | Integer[None] | Number | Boolean[bool] | Boolean[None] | Text[str] | Text[None]
