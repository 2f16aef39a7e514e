"""Markup in text that comes in pieces: a marker that has half arrived is held back, nothing else is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache


def find_first(data: str, place: int, markers: Sequence[str]) -> tuple[int, str]:
    """Where the first of the markers begins from `place` on, and which; of those at one place the longest.

    Without any: where one may have begun that the text's end cuts, which is `len(data)` if none may have; and "".
    """
    found = _any_of(tuple(markers)).search(data, place)
    if found is not None:
        return found.start(), found[0]
    return min((_cut(data, place, marker) for marker in markers), default=len(data)), ""


@lru_cache
def _any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(marker) for marker in sorted(markers, key=len, reverse=True)) or "(?!)")


def _cut(data: str, place: int, marker: str) -> int:
    """Where the longest beginning of a marker stands at the end of the text."""
    for start in range(max(place, len(data) - len(marker) + 1), len(data)):
        if marker.startswith(data[start:]):
            return start
    return len(data)
