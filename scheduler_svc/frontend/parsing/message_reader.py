"""One assistant's message as it comes: reasoning first, then content and calls of tools."""

from __future__ import annotations

from typing import Any

from scheduler_svc.frontend.parsing.call_parser import CallParser
from scheduler_svc.frontend.parsing.parts import Arguments, CallStart, Content, Part, Reasoning, merged
from scheduler_svc.frontend.parsing.reasoning import ReasoningSplitter


class MessageReader:
    """Turns text into parts. Whatever the pieces that the text comes in, the parts joined are the same."""

    def __init__(
        self,
        splitter: ReasoningSplitter | None,
        calls: CallParser | None,
        *,
        include_reasoning: bool = True,
        stop_for_calls: str = "tool_calls",
    ) -> None:
        """None of `splitter`, `calls`: there is no reasoning, there are no calls.

        `stop_for_calls`: the API's word for the end of a message that calls tools.
        """
        self._splitter, self._calls, self._include_reasoning = splitter, calls, include_reasoning
        self._stop_for_calls = stop_for_calls
        self._num_read = 0
        """Characters so far."""

    def feed(self, text: str, *, final: bool = False) -> list[Part]:
        """What is certain with this text; if it is the `final` one, all that is left."""
        self._num_read += len(text)
        split: list[Part] = [Content(text)] if text else []
        if self._splitter is not None:
            split = self._splitter.feed(text)
            if final:
                split += self._splitter.finish()
        # Nothing is split off behind the reasoning: from where content begins, all is content.
        place = self._num_read - sum([len(part.text) for part in split if isinstance(part, Content)])
        parts: list[Part] = []
        for part in split:
            if isinstance(part, Content):
                if self._calls is not None:
                    self._calls.position = place
                    parts += self._calls.feed(part.text)
                place += len(part.text)
                if self._calls is None:
                    parts.append(Content(part.text, place))
            elif self._include_reasoning or not isinstance(part, Reasoning):
                parts.append(part)
        if final and self._calls is not None:
            parts += self._calls.finish()
        return merged(parts)

    def finish_reason(self, reason: str) -> str:
        """The API's word for how the message ended: another one in the place of `stop` where it calls tools."""
        calls = reason == "stop" and self._calls is not None and self._calls.num_calls
        return self._stop_for_calls if calls else reason


def whole_message(parts: list[Part]) -> dict[str, Any]:
    """The `message` of a choice, from the parts of all its text. Its content is null where there are calls alone."""
    content = "".join([part.text for part in parts if isinstance(part, Content)])
    reasoning = "".join([part.text for part in parts if isinstance(part, Reasoning)])
    calls: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, CallStart):
            function = {"name": part.name, "arguments": ""}
            calls.append({"id": part.id, "type": "function", "function": function})
        elif isinstance(part, Arguments):
            calls[part.index]["function"]["arguments"] += part.text
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if reasoning:
        message |= {"reasoning_content": reasoning, "reasoning": reasoning}
    if calls:
        message |= {"content": content or None, "tool_calls": calls}
    return message
