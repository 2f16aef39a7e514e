"""What a response puts out: its items, and the events that tell of them as they come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from scheduler_svc.frontend.parsing.parts import Arguments, CallStart, Content, Part, Reasoning
from scheduler_svc.frontend.responses.scores import PlacedLogprobs

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of item. `prefix`: of its id; `event`: the name of the events that bring its text."""

    name: str
    prefix: str
    event: str


MESSAGE = Kind("message", "msg", "response.output_text")
REASONING = Kind("reasoning", "rs", "response.reasoning_text")
CALL = Kind("function_call", "fc", "response.function_call_arguments")


class Output:
    """Gathers an answer's parts. One item is open at a time: the next one closes it."""

    def __init__(self, request_id: str, scores: PlacedLogprobs | None = None) -> None:
        """`scores`: from which each text takes its own, if logprobs are told."""
        self._request_id, self._scores = request_id, scores
        self.items: list[dict[str, Any]] = []
        self._kind: Kind | None = None
        """Of the last item, where it is open."""
        self._texts: list[str] = []
        """Its text so far."""
        self._entries: list[bytes] = []
        """Its logprobs so far."""
        self.num_characters: dict[str, int] = {}
        """Of all text, by the name of its kind."""

    def add(self, part: Part) -> list[Event]:
        """The events that tell of it."""
        match part:
            case CallStart(_, call_id, name):
                return [*self.close(), *self._open(CALL, arguments="", call_id=call_id, name=name)]
            case Content(text):
                kind = MESSAGE
            case Reasoning(text):
                kind = REASONING
            case Arguments(_, text):
                kind = CALL
        events = [] if self._kind is kind else [*self.close(), *self._open(kind)]
        entries = self._take_entries(part)
        self._texts.append(text)
        self._entries += entries
        self.num_characters[kind.name] = self.num_characters.get(kind.name, 0) + len(text)
        return [*events, {"type": f"{kind.event}.delta", **self._place(), "delta": text, **_logprobs(kind, entries)}]

    def _take_entries(self, part: Content | Reasoning | Arguments) -> list[bytes]:
        if self._scores is None:
            return []
        if isinstance(part, Content):
            return self._scores.take(part)
        self._scores.pass_by(part.text)
        return []

    def close(self, status: str = "completed") -> list[Event]:
        """The open item ends, if there is one: the events that tell so."""
        kind, self._kind = self._kind, None
        if kind is None:
            return []
        text, item, place = "".join(self._texts), self.items[-1], self._place(kind)
        item["status"] = status
        if kind is CALL:
            item["arguments"] = text
            told = [{"type": f"{kind.event}.done", **place, "arguments": text, "name": item["name"]}]
        else:
            logprobs = _logprobs(kind, self._entries)
            part = _part(kind, text, logprobs)
            item["content"] = [part]
            told = [
                {"type": f"{kind.event}.done", **place, "text": text, **logprobs},
                {"type": "response.content_part.done", **place, "part": part},
            ]
        return [*told, {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}]

    def _open(self, kind: Kind, **members: Any) -> list[Event]:
        index = len(self.items)
        item = {"id": f"{kind.prefix}_{self._request_id}_{index}", "type": kind.name, "status": "in_progress"}
        if kind is not CALL:
            members = {"role": "assistant", "content": []} if kind is MESSAGE else {"summary": [], "content": []}
        item |= members
        self.items.append(item)
        self._kind, self._texts, self._entries = kind, [], []
        events: list[Event] = [{"type": "response.output_item.added", "output_index": index, "item": {**item}}]
        if kind is not CALL:
            events.append(
                {"type": "response.content_part.added", **self._place(), "part": _part(kind, "", _logprobs(kind, []))}
            )
        return events

    def _place(self, kind: Kind | None = None) -> dict[str, Any]:
        """Members of an event that tell what it is about."""
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return place if (kind or self._kind) is CALL else {**place, "content_index": 0}


def _logprobs(kind: Kind, entries: list[bytes]) -> dict[str, Any]:
    """As a member of what tells text. It is there where none are told, too: clients' types have it."""
    if kind is not MESSAGE:
        return {}
    return {"logprobs": orjson.Fragment(b"[%b]" % b",".join(entries))}


def _part(kind: Kind, text: str, logprobs: dict[str, Any]) -> dict[str, Any]:
    if kind is MESSAGE:
        return {"type": "output_text", "text": text, "annotations": [], **logprobs}
    return {"type": "reasoning_text", "text": text}


class ReasoningTokens:
    """How many of an answer's tokens are reasoning, the token that ends it included."""

    def __init__(self, end_id: int | None) -> None:
        """`end_id`: of the tag that ends the reasoning; None where it is no token by itself."""
        self._end_id = end_id
        self._num_seen = 0
        self._found: int | None = None

    def add(self, ids: list[int]) -> None:
        """More tokens of the answer."""
        if self._found is None and self._end_id is not None and self._end_id in ids:
            self._found = self._num_seen + ids.index(self._end_id) + 1
        self._num_seen += len(ids)

    def count(self, output: Output, num_tokens: int) -> int:
        """Of an answer of so many tokens. Without such a token: the share that its characters have."""
        thought = output.num_characters.get(REASONING.name, 0)
        if not thought:
            return 0
        if self._found is not None:
            return self._found
        return num_tokens * thought // sum(output.num_characters.values())
