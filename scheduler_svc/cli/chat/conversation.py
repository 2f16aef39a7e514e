"""What has been said, and the request for what comes next."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from scheduler_svc.cli.connection import Connection, understanding


class Piece(NamedTuple):
    """Some text of an answer."""

    text: str
    is_reasoning: bool


@dataclass(slots=True)
class Conversation:
    """`answer` puts a question, and notes both when the stream ends, however it ends."""

    connection: Connection
    model: str
    system: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    """Further fields of the request."""
    messages: list[dict[str, str]] = field(default_factory=list)
    """Without the system's."""
    finish_reason: str = ""
    """Of the last answer."""
    tokens: int = 0
    """Of the last answer, where the server tells it."""

    def answer(self, question: str) -> Generator[Piece]:
        """The answer as it comes. Closing the iterator ends the request.

        An answer that was broken off stays in the conversation as far as it came; a question without any answer does
        not. Raises `CommandError`.
        """
        asked = {"role": "user", "content": question}
        system = [{"role": "system", "content": self.system}] if self.system else []
        body = {
            "model": self.model,
            "messages": [*system, *self.messages, asked],
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.parameters,
        }
        said: list[str] = []
        self.finish_reason, self.tokens = "", 0
        try:
            with self.connection.events("/v1/chat/completions", body) as events:
                for _, event in events:
                    with understanding(self.connection.url):
                        pieces = [*self._take(event)]
                    for piece in pieces:
                        if not piece.is_reasoning:
                            said.append(piece.text)
                        yield piece
        finally:
            if said:
                self.messages += [asked, {"role": "assistant", "content": "".join(said)}]

    def _take(self, event: dict[str, Any]) -> Iterator[Piece]:
        if usage := event.get("usage"):
            self.tokens = usage.get("completion_tokens", 0)
        for choice in event.get("choices") or []:
            delta = choice.get("delta") or {}
            # vLLM has called it both.
            for text, is_reasoning in (
                (delta.get("reasoning_content") or delta.get("reasoning"), True),
                (delta.get("content"), False),
            ):
                if text and not isinstance(text, str):
                    raise TypeError(f"the text of a piece is {type(text).__name__}")
                if text:
                    yield Piece(text, is_reasoning)
            self.finish_reason = choice.get("finish_reason") or self.finish_reason

    def take_back(self) -> str:
        """Forget the last question and its answer. Returns the question; empty where there is none."""
        if not self.messages:
            return ""
        question = self.messages[-2]["content"]
        del self.messages[-2:]
        return question
