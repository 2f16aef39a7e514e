"""Pieces of an assistant's message, in the order of the model's text."""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user. `end`: how many characters of the model's text there are up to its own end; -1: not told."""

    text: str
    end: int = field(default=-1, compare=False)


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
    """The same with each joined to the one before it that it goes on with."""
    groups: list[list[Part]] = []
    for part in parts:
        if groups and _goes_on(groups[-1][-1], part):
            groups[-1].append(part)
        else:
            groups.append([part])
    return [group[0] if len(group) == 1 else _joined(group) for group in groups]


def _goes_on(before: Part, part: Part) -> bool:
    """Content does not where markup between was left out."""
    match before, part:
        case (Content(), Content()):
            return before.end + len(part.text) == part.end or part.end < 0
        case (Reasoning(), Reasoning()):
            return True
        case (Arguments(), Arguments()):
            return before.index == part.index
    return False


def _joined(group: list[Part]) -> Part:
    last = group[-1]
    assert not isinstance(last, CallStart)
    return replace(last, text="".join([part.text for part in group if not isinstance(part, CallStart)]))
