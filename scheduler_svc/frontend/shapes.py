"""How the two APIs write what is otherwise the same answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import orjson

from scheduler_svc.frontend.logprobs import GatheredLogprobs, JoinedLogprobs, LogprobWriter
from scheduler_svc.frontend.output import Entry
from scheduler_svc.frontend.parsing.message_reader import whole_message
from scheduler_svc.frontend.parsing.parts import Arguments, CallStart, Content, Part, Reasoning


class Shape(Protocol):
    """One API's words for an answer."""

    object_name: str
    chunk_object_name: str
    id_prefix: str
    tells_prompt_once: bool
    """What is told of a prompt stands beside the choices, not in each of them."""
    text_frame: tuple[bytes, bytes]
    """What stands before and behind a chunk's text, a JSON string, in the member of its choice."""

    def payload(self, part: Part) -> bytes:
        """A part of an answer, as the JSON member of its chunk's choice."""

    def opening(self) -> bytes:
        """The member of a choice's first chunk, which is sent when its first result arrives; empty for none."""

    def logprobs(self, entries: Sequence[Entry]) -> dict[str, Any]:
        """The value of `logprobs`."""

    def gathered_logprobs(self) -> GatheredLogprobs:
        """What takes the values of one choice, in an answer that is not streamed."""

    def message(self, parts: list[Part]) -> dict[str, Any]:
        """The member of a choice, in an answer that is not streamed, that tells all its text."""


class CompletionShape:
    """`/v1/completions`."""

    object_name = chunk_object_name = "text_completion"
    id_prefix = "cmpl-"
    tells_prompt_once = False
    text_frame = (b'"text":', b"")

    def __init__(self, logprobs: LogprobWriter) -> None:
        self._logprobs = logprobs

    def payload(self, part: Part) -> bytes:
        assert isinstance(part, Content)
        return b'"text":' + orjson.dumps(part.text)

    def opening(self) -> bytes:
        return b""

    def logprobs(self, entries: Sequence[Entry]) -> dict[str, Any]:
        return self._logprobs.completion(entries)

    def gathered_logprobs(self) -> GatheredLogprobs:
        return JoinedLogprobs(self.logprobs([]))

    def message(self, parts: list[Part]) -> dict[str, Any]:
        return {"text": "".join([part.text for part in parts if isinstance(part, Content)])}


class ChatShape:
    """`/v1/chat/completions`."""

    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"
    id_prefix = "chatcmpl-"
    tells_prompt_once = True
    text_frame = (b'"delta":{"content":', b"}")

    def __init__(self, logprobs: LogprobWriter) -> None:
        self._logprobs = logprobs

    def payload(self, part: Part) -> bytes:
        return b'"delta":' + orjson.dumps(_delta(part))

    def opening(self) -> bytes:
        return b'"delta":{"role":"assistant","content":""}'

    def logprobs(self, entries: Sequence[Entry]) -> dict[str, Any]:
        return {"content": self._logprobs.chat(entries), "refusal": None}

    def gathered_logprobs(self) -> GatheredLogprobs:
        return JoinedLogprobs(self.logprobs([]))

    def message(self, parts: list[Part]) -> dict[str, Any]:
        return {"message": whole_message(parts)}


def _delta(part: Part) -> dict[str, Any]:
    """A part of a chat's message: of a call its id and name first, then arguments."""
    match part:
        case Content(text):
            return {"content": text} if text else {}
        case Reasoning(text):
            return {"reasoning_content": text}
        case CallStart(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case Arguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
