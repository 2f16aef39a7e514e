"""A client that puts load on any server of OpenAI's API, and what it sees: times of tokens, by request."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

SHORTEST_PROMPT, LONGEST_PROMPT = 16, 512
SHORTEST_OUTPUT, LONGEST_OUTPUT = 8, 256
LOWEST_ID, HIGHEST_ID = 10, 4000
"""Token ids of synthetic prompts: every model has them, and they are no special ones."""


@dataclass(frozen=True, slots=True)
class Request:
    """prompt: token ids. output: tokens of the answer, no more and no fewer."""

    prompt: list[int]
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


def synthetic(count: int, seed: int = 0) -> list[Request]:
    """Lengths with a long tail: log-normal, cut at both ends."""
    random = np.random.default_rng(seed)
    prompts = random.lognormal(np.log(100), 1.0, count).clip(SHORTEST_PROMPT, LONGEST_PROMPT).astype(int)
    outputs = random.lognormal(np.log(60), 0.9, count).clip(SHORTEST_OUTPUT, LONGEST_OUTPUT).astype(int)
    return [
        Request(random.integers(LOWEST_ID, HIGHEST_ID, prompt).tolist(), int(output))
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def read_workload(path: Path) -> list[Request]:
    """JSON lines with `prompt_ids` and `output_len`."""
    rows = (json.loads(line) for line in path.read_text().splitlines() if line.strip())
    return [Request(row["prompt_ids"], row["output_len"]) for row in rows]


def salted(requests: Sequence[Request], salt: int) -> list[Request]:
    """The same lengths with another second token, from among the prompts' own: no prefix is met twice, and a first
    token that begins every text stays."""
    random = np.random.default_rng(salt)
    ids = np.unique(np.concatenate([request.prompt[1:] for request in requests]))
    chosen = random.choice(ids, len(requests)).tolist()
    return [
        replace(request, prompt=[request.prompt[0], new, *request.prompt[2:]])
        for request, new in zip(requests, chosen, strict=True)
    ]


class Client:
    """One connection a request, as from many clients."""

    def __init__(self, url: str, model: str | None, timeout_s: float = 600.0) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._model, self._timeout_s = model, timeout_s

    async def ask(self, request: Request) -> Answer:
        """Stream one completion. What goes wrong stands in the answer."""
        body: dict[str, Any] = {
            "prompt": request.prompt,
            "max_tokens": request.output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._model is not None:
            body["model"] = self._model
        answer = Answer(time.monotonic())
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._stream(json.dumps(body).encode(), answer)
        except (OSError, ValueError, TimeoutError, asyncio.IncompleteReadError) as error:
            answer.error = f"{type(error).__name__}: {error}"
        answer.ended = time.monotonic()
        if not answer.error and answer.tokens != request.output:
            answer.error = f"{answer.tokens} tokens instead of {request.output}"
        return answer

    async def _stream(self, body: bytes, answer: Answer) -> None:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            writer.write(head.encode() + body)
            status = await reader.readline()
            chunked = await _is_chunked(reader)
            if b" 200 " not in status:
                text = (await reader.read(2000)).decode(errors="replace")
                raise ValueError(f"{status.decode(errors='replace').strip()} {text}")
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
    """One line of the event stream. A last event without text brings no token."""
    if not line.startswith(b"data: {"):
        return
    now = time.monotonic()
    event = json.loads(line[len(b"data: ") :])
    if event.get("error"):
        raise ValueError(str(event["error"]))
    for choice in event.get("choices") or []:
        if choice.get("text") or choice.get("finish_reason") is None:
            answer.times.append(now)
    answer.tokens = (event.get("usage") or {}).get("completion_tokens", answer.tokens)


async def closed_loop(client: Client, requests: Sequence[Request], concurrency: int) -> list[Answer]:
    """So many clients, of which each sends its next request when it has the answer to its last."""
    waiting = iter(requests)
    answers: list[Answer] = []

    async def work() -> None:
        for request in waiting:
            answers.append(await client.ask(request))

    await asyncio.gather(*(work() for _ in range(concurrency)))
    return answers


async def open_loop(client: Client, requests: Sequence[Request], rate: float, seed: int = 0) -> list[Answer]:
    """Poisson arrivals, `rate` a second, whether or not answers come."""
    arrivals = np.random.default_rng(seed).exponential(1 / rate, len(requests)).cumsum()
    begin = time.monotonic()

    async def one(request: Request, at: float) -> Answer:
        await asyncio.sleep(max(0.0, begin + at - time.monotonic()))
        return await client.ask(request)

    return list(await asyncio.gather(*map(one, requests, arrivals.tolist())))


def figures(answers: Sequence[Answer]) -> dict[str, float]:
    """Times in milliseconds. ITL: between two events of a request. TPOT: of a request, from its first token to its
    last over the tokens behind the first. `failed` answers count nowhere else."""
    good = [answer for answer in answers if not answer.error and answer.times]
    found: dict[str, float] = {"requests": len(good), "failed": len(answers) - len(good)}
    if not good:
        return found
    seconds = max(answer.ended for answer in good) - min(answer.sent for answer in good)
    tokens = sum(answer.tokens for answer in good)
    found |= {"seconds": seconds, "output_tokens": tokens, "output_tokens_per_s": tokens / seconds}
    first = [answer.times[0] - answer.sent for answer in good]
    between = [later - sooner for answer in good for sooner, later in zip(answer.times, answer.times[1:], strict=False)]
    each = [(answer.times[-1] - answer.times[0]) / (answer.tokens - 1) for answer in good if answer.tokens > 1]
    for name, values, quantiles in (("ttft", first, (50, 99)), ("itl", between, (50, 99)), ("tpot", each, (50,))):
        if values:
            found |= {f"{name}_p{q}_ms": 1000 * float(np.percentile(values, q)) for q in quantiles}
    return found
