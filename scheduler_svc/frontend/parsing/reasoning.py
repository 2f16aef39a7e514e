"""`<think>…</think>` at the beginning of an answer, split from what follows it."""

from __future__ import annotations

from collections.abc import Callable

from scheduler_svc.frontend.parsing.markers import find_first
from scheduler_svc.frontend.parsing.parts import Content, Part, Reasoning, add_part

THINK, THINK_END = "<think>", "</think>"
SPACES = " \t\r\n"


class ReasoningSplitter:
    """Follows one answer. White space at the edges of the reasoning, and between it and the answer, is no text.

    An answer that does not begin with `<think>` is content, unless its prompt `is_open`: ends within the reasoning.
    """

    def __init__(self, *, is_open: bool) -> None:
        self._is_open = is_open
        self._held = ""
        """Text that may be the beginning of a marker."""
        self._spaces: list[str] = []
        """White space that is text only if other text follows."""
        self._state: Callable[[str, list[Part]], str] = self._begin

    def feed(self, text: str) -> list[Part]:
        """What is certain with this text."""
        parts: list[Part] = []
        data, self._held = self._held + text, ""
        while data:
            data = self._state(data, parts)
        return parts

    def finish(self) -> list[Part]:
        """The rest, when no text follows."""
        rest, self._held = self._held, ""
        parts: list[Part] = []
        if self._state == self._begin:
            rest = "".join(self._spaces) + rest
            add_part(parts, Reasoning(rest.strip(SPACES)) if self._is_open else Content(rest))
        elif self._state == self._think and rest:
            add_part(parts, Reasoning("".join(self._spaces) + rest))
        return parts

    # --- states: each takes some of the text and returns the rest of it ---

    def _begin(self, data: str, parts: list[Part]) -> str:
        rest = data.lstrip(SPACES)
        self._spaces.append(data[: len(data) - len(rest)])
        if not rest:
            return ""
        if rest.startswith(THINK):
            self._spaces, self._state = [], self._before_thought
            return rest[len(THINK) :]
        if THINK.startswith(rest):
            self._held = rest
            return ""
        if self._is_open:
            self._spaces, self._state = [], self._think
            return rest
        add_part(parts, Content("".join(self._spaces)))
        self._state = self._answer
        return rest

    def _before_thought(self, data: str, _parts: list[Part]) -> str:
        rest = data.lstrip(SPACES)
        if rest:
            self._state = self._think
        return rest

    def _think(self, data: str, parts: list[Part]) -> str:
        found, marker = self._find_end(data)
        thought = data[:found].rstrip(SPACES)
        if thought:
            add_part(parts, Reasoning("".join(self._spaces) + thought))
            self._spaces = []
        self._spaces.append(data[len(thought) : found])
        if marker:
            self._state = self._before_answer
            return data[found + len(marker) :]
        self._held = data[found:]
        return ""

    def _find_end(self, data: str) -> tuple[int, str]:
        """As `find_first`."""
        return find_first(data, 0, (THINK_END,))

    def _before_answer(self, data: str, _parts: list[Part]) -> str:
        rest = data.lstrip(SPACES)
        if rest:
            self._state = self._answer
        return rest

    def _answer(self, data: str, parts: list[Part]) -> str:
        add_part(parts, Content(data))
        return ""
