"""Pieces of an assistant's message, in the order of the model's text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call of a tool begins. `index`: its place among the calls of the message."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of a call's arguments, as the model writes them."""

    index: int
    text: str


Part = Content | Reasoning | CallStart | Arguments


def add_part(parts: list[Part], part: Part) -> None:
    """Append it, unless its text is empty."""
    if isinstance(part, CallStart) or part.text:
        parts.append(part)


def merged(parts: list[Part]) -> list[Part]:
    """The same with neighbours of one kind joined."""
    whole: list[Part] = []
    for _, group in groupby(parts, _kind):
        same = list(group)
        first = same[0]
        if len(same) > 1 and not isinstance(first, CallStart):
            first = replace(first, text="".join([part.text for part in same if not isinstance(part, CallStart)]))
        whole.append(first)
    return whole


def _kind(part: Part) -> tuple[type[Part], int]:
    """Alike for parts that can be joined."""
    return type(part), part.index if isinstance(part, CallStart | Arguments) else 0
