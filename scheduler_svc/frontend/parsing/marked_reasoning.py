"""Reasoning before an answer that a grammar bounds: it ends where the executor sees its end, at a token.

The same characters spelled with other tokens are a thought like any other.
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_svc.frontend.parsing.parts import Part
from scheduler_svc.frontend.parsing.reasoning import THINK_END, ReasoningSplitter


@dataclass(frozen=True, slots=True)
class Marks:
    """Token ids. `start`: what begins reasoning if it comes first; None: the prompt ends within the reasoning."""

    start: int | None
    end: int


class ReasoningPlace:
    """Where the reasoning stands in one answer's text, told by the answer's tokens."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._is_first = True
        self.exists = True
        """Whether there is any, once the first token has come."""
        self.end: int | None = None
        """Characters up to the end of the marker that ends it; None: it has not come."""

    def take(self, token: int, length: int) -> None:
        """The next token, with which the text has so many characters."""
        if self._is_first:
            self._is_first = False
            self.exists = self._marks.start is None or token == self._marks.start
        if self.exists and self.end is None and token == self._marks.end:
            self.end = length


class MarkedSplitter(ReasoningSplitter):
    """As its base, but told by a place where the reasoning ends. All behind it is the answer, white space too."""

    def __init__(self, place: ReasoningPlace, *, is_open: bool) -> None:
        super().__init__(is_open=is_open)
        self._place, self._num_fed = place, 0

    def feed(self, text: str) -> list[Part]:
        self._num_fed += len(text)
        return super().feed(text)

    def _begin(self, data: str, parts: list[Part]) -> str:
        if self._place.exists:
            return super()._begin(data, parts)
        self._state = self._answer
        return data

    def _find_end(self, data: str) -> tuple[int, str]:
        if self._place.end is None:
            return len(data), ""
        found = self._place.end - len(THINK_END) - (self._num_fed - len(data))
        whole = found + len(THINK_END) <= len(data)
        return min(found, len(data)), THINK_END if whole else ""

    def _before_answer(self, data: str, _parts: list[Part]) -> str:
        self._state = self._answer
        return data
