"""Stop strings in streamed text: an automaton (Aho & Corasick 1975) over all stop strings of a request.

Text that could be the beginning of a stop string is held back; nothing else is. The string that is complete first ends
the text; of several complete at the same character, the longest.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Match:
    """Where a stop string was found: `text` is what to show before it, `stop` the string itself."""

    text: str
    stop: str


class StopAutomaton:
    """Goto, failure and output functions of the stop strings; shared by the sequences of a request."""

    def __init__(self, stops: list[str]) -> None:
        self.depth = [0]
        self.output: list[str | None] = [None]
        self.edges: list[dict[str, int]] = [{}]
        self._failure = [0]
        for stop in stops:
            node = 0
            for character in stop:
                following = self.edges[node].get(character)
                if following is None:
                    following = self.edges[node][character] = len(self.edges)
                    self.edges.append({})
                    self.depth.append(self.depth[node] + 1)
                    self.output.append(None)
                    self._failure.append(0)
                node = following
            self.output[node] = stop
        self._link()

    def _link(self) -> None:
        """Breadth first, so that the failure of a node is known before its children's."""
        queue = deque(self.edges[0].values())
        while queue:
            node = queue.popleft()
            for character, child in self.edges[node].items():
                self._failure[child] = self.step(self._failure[node], character)
                queue.append(child)
            if self.output[node] is None:
                self.output[node] = self.output[self._failure[node]]

    def step(self, node: int, character: str) -> int:
        """The node of the longest suffix of the text that begins some stop string."""
        while True:
            following = self.edges[node].get(character)
            if following is not None:
                return following
            if node == 0:
                return 0
            node = self._failure[node]


class StopMatcher:
    """Follows the text of one sequence."""

    __slots__ = ("_automaton", "_held", "_node")

    def __init__(self, automaton: StopAutomaton) -> None:
        self._automaton = automaton
        self._node = 0
        self._held = ""

    def feed(self, text: str, enabled: bool = True) -> str | Match:
        """Returns the text that can be shown, or the match. Unless `enabled`, no stop string may end in this text."""
        automaton, node = self._automaton, self._node
        for place, character in enumerate(text):
            node = automaton.step(node, character)
            if enabled and automaton.output[node] is not None:
                stop = automaton.output[node] or ""
                shown = self._held + text[: place + 1]
                return Match(shown[: len(shown) - len(stop)], stop)
        self._node = node
        whole = self._held + text
        certain = len(whole) - automaton.depth[node]
        self._held = whole[certain:]
        return whole[:certain]

    def peek(self, text: str) -> bool:
        """Whether this text, coming next, would complete a stop string."""
        node = self._node
        for character in text:
            node = self._automaton.step(node, character)
            if self._automaton.output[node] is not None:
                return True
        return False

    def flush(self) -> str:
        """What was held back, when no text follows."""
        held, self._held, self._node = self._held, "", 0
        return held
