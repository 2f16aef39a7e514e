"""Server-sent events: the chunks of a streamed answer, joined from prepared pieces of JSON."""

from __future__ import annotations

from typing import Any

import orjson

from scheduler_svc.frontend.parsing.parts import Part
from scheduler_svc.frontend.shapes import Shape
from scheduler_svc.http.errors import ApiError

DONE = b"data: [DONE]\n\n"


class ChunkWriter:
    """Writes the chunks of one streamed answer. `with_usage`: chunks carry a usage member, null or told."""

    def __init__(
        self,
        answer_id: str,
        created: int,
        model: str,
        shape: Shape,
        with_usage: bool,
        told_once: dict[str, Any] | None = None,
    ) -> None:
        """`told_once`: more members of the first chunk."""
        head = {"id": answer_id, "object": shape.chunk_object_name, "created": created, "model": model}
        self._head = b"data: " + orjson.dumps(head)[:-1] + b',"choices":['
        self._first_head = b"data: " + orjson.dumps(head | (told_once or {}))[:-1] + b',"choices":['
        self._shape, self._with_usage = shape, with_usage
        self._starts: dict[int, bytes] = {}
        self._text_starts: dict[int, bytes] = {}
        """Likewise, with what stands before the text."""
        self._end = b',"usage":null}\n\n' if with_usage else b"}\n\n"
        self._plain_end = b',"logprobs":null,"finish_reason":null}]' + self._end
        self._text_end = shape.text_frame[1] + self._plain_end
        self.unsent: list[bytes] = []

    def take(self) -> bytes:
        """All that has been written since the last call."""
        unsent, self.unsent = self.unsent, []
        return unsent[0] if len(unsent) == 1 else b"".join(unsent)

    def open_choice(self, choice: int, usage: dict[str, Any] | None) -> bytes:
        """Write the opening chunk of a choice if it has not been. Returns what each of its chunks starts with."""
        start = self._starts.get(choice)
        if start is None:
            place = b'{"index":%d,' % choice
            start = self._starts[choice] = self._head + place
            opening = self._shape.opening()
            if opening:
                self._add(
                    (start if len(self._starts) > 1 else self._first_head + place) + opening, None, b"null", usage
                )
        return start

    def add_text(self, choice: int, text: str) -> None:
        """A chunk of text and nothing else, or, of no text, the opening chunk alone."""
        start = self._text_starts.get(choice)
        if start is None:
            start = self._text_starts[choice] = self.open_choice(choice, None) + self._shape.text_frame[0]
        if text:
            self.unsent.append(b"".join((start, orjson.dumps(text), self._text_end)))

    def add(self, choice: int, part: Part, told: dict[str, Any], logprobs: Any, usage: dict[str, Any] | None) -> None:
        """One chunk of a choice. `told`: more members of it."""
        start = self.open_choice(choice, usage) + self._members(part, told)
        if logprobs is None and usage is None:
            self.unsent.append(start + self._plain_end)
        else:
            self._add(start, logprobs, b"null", usage)

    def _members(self, part: Part, told: dict[str, Any]) -> bytes:
        payload = self._shape.payload(part)
        return b"".join((payload, b",", orjson.dumps(told)[1:-1])) if told else payload

    def add_finish(
        self,
        choice: int,
        part: Part,
        told: dict[str, Any],
        logprobs: Any,
        finish_reason: str,
        stop_reason: str | int | None,
        usage: dict[str, Any] | None,
    ) -> None:
        """The last chunk of a choice, with the last of its members."""
        start = self.open_choice(choice, usage) + self._members(part, told)
        reasons = orjson.dumps(finish_reason) + b',"stop_reason":' + orjson.dumps(stop_reason)
        self._add(start, logprobs, reasons, usage)

    def _add(self, start: bytes, logprobs: Any, finish: bytes, usage: dict[str, Any] | None) -> None:
        told = b"null" if logprobs is None else orjson.dumps(logprobs)
        end = self._end if usage is None else b',"usage":' + orjson.dumps(usage) + b"}\n\n"
        self.unsent.append(b"".join((start, b',"logprobs":', told, b',"finish_reason":', finish, b"}]", end)))

    def add_done(self, usage: dict[str, Any] | None) -> None:
        """The end of the stream, before it the usage where it was asked for."""
        if usage is not None:
            self.unsent.append(self._head + b'],"usage":' + orjson.dumps(usage) + b"}\n\n")
        self.unsent.append(DONE)

    def add_error(self, error: ApiError) -> None:
        """The end of a stream that went wrong."""
        self.unsent.append(b"data: " + orjson.dumps(error.body) + b"\n\n" + DONE)
