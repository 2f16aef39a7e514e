"""Which of an answer's logprobs belong to the text that a response tells."""

from __future__ import annotations

from collections import deque
from typing import Any

from scheduler_svc.frontend.parsing.parts import Content


class PlacedLogprobs:
    """Entries, as JSON, with the places in the model's text where their tokens begin, until text takes them or passes.

    A token belongs to the text of which it has a character, or in whose midst it stands without one. What belongs to
    none is not told: tokens of reasoning, of calls and of markup, the one that ends the answer, those of a stop string.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._place = 0
        """Of the model's text, so much at least is behind what has been told."""

    def add(self, part: dict[str, Any]) -> None:
        """The next ones, as `ResponseShape.logprobs` gives them."""
        self._waiting.extend(zip(part["offsets"], part["entries"], strict=True))

    def value(self) -> PlacedLogprobs:
        return self

    def take(self, part: Content) -> list[bytes]:
        """Those of the next content, of which all tokens must be there."""
        end = self._place + len(part.text) if part.end < 0 else part.end
        start, waiting, taken = end - len(part.text), self._waiting, []
        while waiting and waiting[0][0] < end:
            offset, entry = waiting.popleft()
            if offset >= start or not waiting or waiting[0][0] > start:
                taken.append(entry)
        self._place = end
        return taken

    def pass_by(self, text: str) -> None:
        """Text has been told that is no content."""
        self._place += len(text)
        while len(self._waiting) > 1 and self._waiting[1][0] <= self._place:
            self._waiting.popleft()
