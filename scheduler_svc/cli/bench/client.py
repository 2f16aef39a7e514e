"""A client that puts load on any server of OpenAI's API, and what it sees: times of tokens, by request.

It speaks HTTP by itself: what a general client does for each event would be measured with the server.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

ERROR_CHARACTERS = 300
BROKEN = (OSError, TimeoutError, asyncio.IncompleteReadError)
ODD = (ValueError, TypeError, AttributeError, LookupError)
"""An answer of another shape than a completion's."""


@dataclass(frozen=True, slots=True)
class Request:
    """prompt: token ids, or a text. output: tokens of the answer."""

    prompt: list[int] | str
    output: int


@dataclass(slots=True)
class Answer:
    """One request as its client saw it, in seconds of the monotonic clock."""

    sent: float
    times: list[float] = field(default_factory=list)
    """Of each event that brought tokens."""
    ended: float = 0.0
    tokens: int = 0
    error: str = ""
    prompt_tokens: int = 0


class Client:
    """One connection a request, as from many clients."""

    def __init__(
        self,
        url: str,
        model: str | None,
        timeout_s: float = 600.0,
        *,
        key: str = "",
        chat: bool = False,
        whole: bool = True,
        extra: dict[str, Any] | None = None,
    ) -> None:
        """url: without `/v1`. chat: ask `/v1/chat/completions`, where prompts are texts. whole: answers are to have
        all of their tokens (`ignore_eos`), and have failed otherwise. extra: more fields of each request.
        """
        parts = urlsplit(url)
        self._is_secure = parts.scheme == "https"
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or (443 if self._is_secure else 80)
        self._model, self._timeout_s = model, timeout_s
        self._chat, self._whole, self._extra = chat, whole, extra or {}
        path = f"{parts.path.rstrip('/')}/v1/{'chat/' * chat}completions"
        self._head = f"POST {path} HTTP/1.1\r\nHost: {parts.netloc.rpartition('@')[2]}\r\n"
        self._head += "Content-Type: application/json\r\nConnection: close\r\n"
        if key:
            self._head += f"Authorization: Bearer {key}\r\n"

    async def ask(self, request: Request) -> Answer:
        """Stream one completion. What goes wrong stands in the answer."""
        body: dict[str, Any] = {
            "max_tokens": request.output,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._chat:
            body["messages"] = [{"role": "user", "content": request.prompt}]
        else:
            body["prompt"] = request.prompt
        if self._whole:
            body["ignore_eos"] = True
        body |= self._extra
        if self._model is not None:
            body["model"] = self._model
        answer = Answer(time.monotonic())
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._stream(json.dumps(body).encode(), answer)
        except (*BROKEN, *ODD) as error:
            answer.error = f"{type(error).__name__}: {error}"
        answer.ended = time.monotonic()
        if self._whole and not answer.error and answer.tokens != request.output:
            answer.error = f"{answer.tokens} tokens instead of {request.output}"
        return answer

    async def _stream(self, body: bytes, answer: Answer) -> None:
        secure = ssl.create_default_context() if self._is_secure else None
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=secure)
        try:
            writer.write(f"{self._head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            status = await reader.readline()
            chunked = await _is_chunked(reader)
            if b" 200 " not in status:
                text = (await reader.read(2000)).decode(errors="replace")
                raise ValueError(f"{status.decode(errors='replace').strip()} {text}"[:ERROR_CHARACTERS])
            rest = b""
            async for part in _parts(reader, chunked):
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    _take(line.strip(), answer)
        finally:
            writer.close()


async def _is_chunked(reader: asyncio.StreamReader) -> bool:
    """Read the headers."""
    chunked = False
    while (line := await reader.readline()).strip():
        name, _, value = line.partition(b":")
        chunked |= name.lower() == b"transfer-encoding" and b"chunked" in value.lower()
    return chunked


async def _parts(reader: asyncio.StreamReader, chunked: bool) -> AsyncIterator[bytes]:
    """The body as it comes (RFC 9112, section 7.1, where it is chunked)."""
    if not chunked:
        while part := await reader.read(1 << 16):
            yield part
        return
    while size := int((await reader.readline()).partition(b";")[0], 16):
        yield (await reader.readexactly(size + 2))[:size]


def _take(line: bytes, answer: Answer) -> None:
    """One line of the event stream."""
    if not line.startswith(b"data: {"):
        return
    now = time.monotonic()
    event = json.loads(line[len(b"data: ") :])
    if event.get("error"):
        raise ValueError(str(event["error"]))
    for choice in event.get("choices") or []:
        if _brings_tokens(choice):
            answer.times.append(now)
    usage = event.get("usage") or {}
    answer.tokens = usage.get("completion_tokens", answer.tokens)
    answer.prompt_tokens = usage.get("prompt_tokens", answer.prompt_tokens)


def _brings_tokens(choice: dict[str, Any]) -> bool:
    """Also where its text is empty: that of half a character is. A chat's first event brings only the role."""
    delta = choice.get("delta")
    if delta is None:
        return bool(choice.get("text")) or choice.get("finish_reason") is None
    text = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or delta.get("tool_calls")
    return bool(text) or ("role" not in delta and choice.get("finish_reason") is None)


Told = Callable[[Answer], None]


async def closed_loop(client: Client, requests: Iterable[Request], concurrency: int, tell: Told) -> None:
    """So many clients, of which each sends its next request when it has the answer to its last; `tell` has them all."""
    waiting = iter(requests)

    async def work() -> None:
        for request in waiting:
            tell(await client.ask(request))

    await asyncio.gather(*(work() for _ in range(concurrency)))


async def open_loop(client: Client, requests: Sequence[Request], arrivals: Sequence[float], tell: Told) -> None:
    """Each request at its time, in seconds from now, whether or not answers come."""
    begin = time.monotonic()

    async def one(request: Request, at: float) -> None:
        await asyncio.sleep(max(0.0, begin + at - time.monotonic()))
        tell(await client.ask(request))

    await asyncio.gather(*map(one, requests, arrivals))
