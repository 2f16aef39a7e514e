"""A bare HTTP/1.1 client that notes when each piece of an answer came, and can leave or dawdle as it is told."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class End(StrEnum):
    """How a connection came to its end."""

    OPEN = "open"
    WHOLE = "whole"
    """The answer is complete, by the rules of HTTP."""
    BROKEN = "broken"
    """The far side closed it in the middle of the answer."""
    LEFT = "left"
    """This client closed it."""
    REFUSED = "refused"
    """It never stood: the request was not accepted."""
    STUCK = "stuck"
    """Nothing more came in all the time that was given."""


@dataclass
class Answer:
    """What came back."""

    began: float = 0.0
    ended: float = 0.0
    port: int = 0
    """This client's own."""
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    """Of an answer that is not a stream."""
    events: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    """When, and what."""
    num_done: int = 0
    """How often the stream said that it was over."""
    num_trailing: int = 0
    """Events after that."""
    end: End = End.OPEN

    @property
    def json(self) -> Any:
        """The parsed body, or None when it is no JSON."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None


async def exchange(
    port: int,
    method: str,
    path: str,
    body: bytes = b"",
    *,
    headers: dict[str, str] | None = None,
    answer: Answer | None = None,
    leave_s: float | None = None,
    pause_s: float = 0.0,
    patience_s: float = 60.0,
) -> Answer:
    """One request on a connection of its own to a port of this machine. How it ended is in the answer."""
    answer = answer or Answer()
    answer.began = time.monotonic()
    try:
        # A slow reader leaves what it has not read to the system.
        limit = 2048 if pause_s else 1 << 22
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=limit)
    except OSError:
        answer.end, answer.ended = End.REFUSED, time.monotonic()
        return answer
    answer.port = writer.get_extra_info("sockname")[1]
    limit_s = patience_s if leave_s is None else leave_s
    try:
        async with asyncio.timeout(limit_s):
            named = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
            head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{named}"
            if body:
                head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            writer.write(head.encode() + b"\r\n" + body)
            await _read(reader, answer, pause_s)
            answer.end = End.WHOLE
    except TimeoutError:
        answer.end = End.STUCK if leave_s is None else End.LEFT
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
        answer.end = End.BROKEN
    finally:
        answer.ended = time.monotonic()
        writer.transport.abort()
    return answer


async def _read(reader: asyncio.StreamReader, answer: Answer, pause_s: float) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    answer.status = int(head[0].split()[1])
    pairs = (line.partition(":") for line in head[1:] if line)
    answer.headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    is_stream = answer.headers.get("content-type", "").startswith("text/event-stream")
    if answer.headers.get("transfer-encoding") != "chunked":
        answer.body = await reader.readexactly(int(answer.headers.get("content-length", "0")))
        return
    unread = b""
    while size := int((await reader.readuntil(b"\r\n")).strip(), 16):
        piece = (await reader.readexactly(size + 2))[:-2]
        if not is_stream:
            answer.body += piece
            continue
        *lines, unread = (unread + piece).split(b"\n\n")
        for line in lines:
            take_event(answer, line, time.monotonic())
        if pause_s:
            await asyncio.sleep(pause_s)
    await reader.readexactly(2)


def take_event(answer: Answer, line: bytes, now: float) -> None:
    """Note one server-sent event. Raises ValueError when it is none."""
    if not line.startswith(b"data: "):
        raise ValueError("no event")
    answer.num_trailing += bool(answer.num_done)
    if line == b"data: [DONE]":
        answer.num_done += 1
    else:
        answer.events.append((now, json.loads(line[6:])))


async def get(port: int, path: str, patience_s: float = 5.0) -> Answer:
    return await exchange(port, "GET", path, patience_s=patience_s)
