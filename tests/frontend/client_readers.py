"""What each client takes from an answer, by the rules of its own code: the versions stand in tests/clients/shapes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass
class Taken:
    """Text, and the counts of the usage, None where the client was told none."""

    text: str
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reason: str | None = None
    first_piece: int = -1
    """Which chunk the client takes for the first token: its time to first token."""
    calls: list[tuple[str, str]] = field(default_factory=list)
    """Functions with their arguments."""


def openai(response: httpx.Response) -> Taken:
    """openai-python, and what stands on it: LangChain, LiteLLM, Open WebUI. Lines of `data:`, all choices."""
    if not _is_stream(response):
        return _whole(response.json())
    taken = Taken("")
    for number, chunk in enumerate(_chunks(response)):
        assert chunk["id"] and chunk["created"] and chunk["model"]
        for choice in chunk["choices"]:
            piece = (choice["delta"].get("content") if "delta" in choice else choice["text"]) or ""
            if piece and taken.first_piece < 0:
                taken.first_piece = number
            taken.text += piece
            taken.finish_reason = choice["finish_reason"] or taken.finish_reason
            for call in choice.get("delta", {}).get("tool_calls") or []:
                if call["index"] == len(taken.calls):
                    assert call["id"] and call["type"] == "function"
                    taken.calls.append((call["function"]["name"], ""))
                name, arguments = taken.calls[call["index"]]
                taken.calls[call["index"]] = name, arguments + (call["function"].get("arguments") or "")
        _count(taken, chunk.get("usage"))
    return taken


def vllm_bench(response: httpx.Response) -> Taken:
    """vLLM's bench serve: events between blank lines; the first chunk with choices, even without text, is the first
    token; the usage is read only from a chunk without choices.
    """
    taken = Taken("")
    for number, event in enumerate(event for event in response.text.split("\n\n") if event):
        data = event.strip().removeprefix("data: ")
        if data == "[DONE]":
            continue
        chunk = json.loads(data)
        if choices := chunk.get("choices"):
            if taken.first_piece < 0:
                taken.first_piece = number
            delta = choices[0].get("delta")
            taken.text += (choices[0].get("text") if delta is None else delta.get("content")) or ""
        else:
            _count(taken, chunk.get("usage"))
    return taken


def guidellm(response: httpx.Response) -> Taken:
    """guidellm: line by line; the last usage seen counts; an `error` in a chunk fails the request."""
    taken, done = Taken(""), False
    for number, line in enumerate(line for line in response.text.splitlines() if line.startswith("data:")):
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            done = True
            break
        chunk = json.loads(data)
        assert not chunk.get("error")
        choice = (chunk.get("choices") or [{}])[0]
        piece = choice.get("text") or choice.get("delta", {}).get("content")
        if piece and taken.first_piece < 0:
            taken.first_piece = number
        taken.text += piece or ""
        _count(taken, chunk.get("usage"))
    assert done
    return taken


def aiperf(response: httpx.Response) -> Taken:
    """aiperf: a chunk whose `object` it does not know is left out."""
    taken = Taken("")
    for chunk in _chunks(response) if _is_stream(response) else [response.json()]:
        if chunk["object"] == "chat.completion.chunk" and chunk["choices"]:
            taken.text += chunk["choices"][0]["delta"].get("content") or ""
        elif chunk["object"] == "chat.completion":
            taken.text += chunk["choices"][0]["message"]["content"]
        elif chunk["object"] in ("completion", "text_completion") and chunk["choices"]:
            taken.text += chunk["choices"][0]["text"]
        _count(taken, chunk.get("usage"))
    return taken


def llmperf(response: httpx.Response) -> Taken:
    """llmperf: six bytes are cut off every line that is not blank, and every chunk must have a choice with a delta."""
    taken = Taken("")
    for line in response.content.splitlines():
        if not (line := line.strip()) or line[6:] == b"[DONE]":
            continue
        chunk = json.loads(line[6:])
        assert "error" not in chunk
        taken.text += chunk["choices"][0]["delta"].get("content") or ""
    return taken


def lm_eval(response: httpx.Response) -> Taken:
    """lm-eval: choices by their index; of logprobs what stands before the one token that it must ask for.

    Here: the first choice's text.
    """
    choices = sorted(response.json()["choices"], key=lambda choice: choice["index"])
    for choice in choices:
        if (logprobs := choice.get("logprobs")) is not None:
            scores, tops = logprobs["token_logprobs"], logprobs["top_logprobs"]
            assert len(scores) == len(tops) > 2 and scores[0] is None
            # Whether the text is the greedy one is told by the very same float.
            assert all(score in top.values() for score, top in zip(scores[1:], tops[1:], strict=True))
            assert sum(scores[1:-1]) < 0
    first = choices[0]
    return Taken(first["message"]["content"] if "message" in first else first["text"])


READERS: dict[str, Callable[[httpx.Response], Taken]] = {
    "aiperf": aiperf,
    "guidellm": guidellm,
    "langchain": openai,
    "litellm": openai,
    "llmperf": llmperf,
    "lm_eval": lm_eval,
    "open_webui": openai,
    "vllm_bench": vllm_bench,
}
"""By the name of the file in tests/clients/shapes."""


def _is_stream(response: httpx.Response) -> bool:
    return response.headers["content-type"].startswith("text/event-stream")


def _chunks(response: httpx.Response) -> Iterator[Any]:
    for line in response.text.split("\n"):
        if line and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def _whole(answer: Any) -> Taken:
    choice = answer["choices"][0]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    taken = Taken(text or "", finish_reason=choice["finish_reason"])
    for call in choice.get("message", {}).get("tool_calls") or []:
        assert call["id"] and call["type"] == "function"
        taken.calls.append((call["function"]["name"], call["function"]["arguments"]))
    _count(taken, answer["usage"])
    return taken


def _count(taken: Taken, usage: Any) -> None:
    if usage:
        taken.prompt_tokens, taken.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
