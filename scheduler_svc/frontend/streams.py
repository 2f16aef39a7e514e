"""What a request waits for: its streams, and the news that the core link brings of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from common.wire import Ended, PromptScores, Tokens
from scheduler_svc.http.errors import ApiError, ClientGone
from scheduler_svc.keys import ANYBODY, ApiKey

Scores = tuple[list[int], list[float]]
"""Token ids and logprobs of one position: the token itself first, then the most likely ones in falling order."""


class Stream:
    """One sequence of a request. `tokens` and `scores` are what came and has not been taken yet."""

    __slots__ = ("choice", "ended", "generation", "in_news", "number", "prompt_scores", "scores", "tokens")

    def __init__(
        self,
        generation: Generation,
        number: int,
        choice: int,
        scored: bool,
        prompt_scores: PromptScoreboard | None,
    ) -> None:
        self.generation, self.number, self.choice = generation, number, choice
        self.tokens: list[int] = []
        self.scores: list[Scores | None] | None = [] if scored else None
        """As long as `tokens`, for a stream that wants logprobs."""
        self.prompt_scores = prompt_scores
        self.ended: Ended | None = None
        self.in_news = False

    def put(self, tokens: list[int], scores: Scores | None = None) -> None:
        """Tokens came: one, where there are `scores`. The list belongs to this stream from now on."""
        if self.tokens:
            self.tokens += tokens
        else:
            self.tokens = tokens
        if self.scores is not None:
            self.scores += [scores] * len(tokens)
        if not self.generation.quiet:
            self.tell()

    def stop(self) -> None:
        """It has said enough: the core need not go on with it."""
        self.generation.abort([self.number], stopped=True)

    def tell(self) -> None:
        """The request is to hear of it."""
        if not self.in_news:
            self.in_news = True
            self.generation.add_news(self)


def tokens_by_stream(messages: Sequence[Tokens]) -> Iterator[tuple[int, list[int]]]:
    """The tokens of iterations that followed each other: each stream's number once, its tokens in order."""
    if len(messages) == 1:
        for number, token in zip(messages[0].streams.tolist(), messages[0].tokens.tolist(), strict=True):
            yield number, [token]
        return
    numbers = np.concatenate([message.streams for message in messages])
    order = np.argsort(numbers, kind="stable")
    numbers = numbers[order]
    if not len(numbers):
        return
    tokens = np.concatenate([message.tokens for message in messages])[order].tolist()
    starts = [0, *(np.flatnonzero(numbers[1:] != numbers[:-1]) + 1).tolist()]
    for number, start, end in zip(numbers[starts].tolist(), starts, [*starts[1:], len(tokens)], strict=True):
        yield number, tokens[start:end]


class PromptScoreboard:
    """Logprobs of one prompt's positions, gathered as chunks of it are computed. Position 0 has none."""

    def __init__(self, prompt: NDArray[np.int32]) -> None:
        self.prompt = prompt.tolist()
        self.scores: list[Scores | None] = [None] * len(prompt)
        self._missing = len(prompt) - 1

    @property
    def complete(self) -> bool:
        return self._missing <= 0

    def add(self, part: PromptScores) -> None:
        ids, values = part.token_ids.tolist(), part.values.tolist()
        place = 0
        for position, width in enumerate(part.widths.tolist(), part.start):
            if width and 0 < position < len(self.scores) and self.scores[position] is None:
                self.scores[position] = (ids[place : place + width], values[place : place + width])
                self._missing -= 1
            place += width


class AbortStreams(Protocol):
    """Has the core drop streams; `stopped`: their answers are whole."""

    def __call__(self, numbers: list[int], *, stopped: bool = False) -> None: ...


class Generation:
    """All streams of one API call."""

    def __init__(
        self,
        abort: AbortStreams,
        on_close: Callable[[Generation], None],
        key: ApiKey = ANYBODY,
        on_news: Callable[[Generation], None] | None = None,
    ) -> None:
        """`key`: what it may use. `on_news`: called when there are news for the first time since they were taken; it
        has `deliver` called soon, which else is at once.
        """
        self.abort, self._on_close, self.key = abort, on_close, key
        self._on_news = on_news or Generation.deliver
        self.tenant = key.tenant
        """Whose texts wait for a thread among each other."""
        self._loop = asyncio.get_running_loop()
        self.streams: list[Stream] = []
        self.news: list[Stream] = []
        self._waiter: asyncio.Future[None] | None = None
        self.listener: Callable[[], None] | None = None
        """Called when there are news, or it is over, where nobody waits in a task of its own."""
        self.failure: ApiError | None = None
        self.gone = False
        self.on_stop: Callable[[], object] | None = None
        """Called when the client leaves, or the request is failed, before there are streams."""
        self.quiet = False
        """Nobody waits for single tokens, only for endings."""
        self.cut_off: Callable[[], None] | None = None
        """Breaks the connection that the answer is streamed to."""
        self.sending = False
        """The client has not read all that was written: until it has, tokens gather here."""

    async def wait(self) -> list[Stream]:
        """Streams of which something came. Raises `ClientGone`, and the `ApiError` that the request was failed with."""
        await self.stirred()
        return self.take_news()

    async def stirred(self) -> None:
        """Until there are news, or it is over."""
        if not self.news and not self.is_over:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def add_news(self, stream: Stream) -> None:
        """Something came of a stream of which all else was taken."""
        self.news.append(stream)
        if len(self.news) == 1:
            self._on_news(self)

    def deliver(self) -> None:
        """Tell who waits or listens."""
        if self.listener is not None:
            self.listener()
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def take_news(self) -> list[Stream]:
        """As `wait`, perhaps none."""
        self.check()
        news, self.news = self.news, []
        for stream in news:
            stream.in_news = False
        return news

    @property
    def is_over(self) -> bool:
        """The client has left, or the request was failed."""
        return self.gone or self.failure is not None

    def check(self) -> None:
        """Raise `ClientGone` or the `ApiError` that the request was failed with, if it is over."""
        if self.gone:
            raise ClientGone
        if self.failure is not None:
            raise self.failure

    def leave(self) -> None:
        """The client has gone: the core stops the work at once, and whoever waits is woken."""
        self.gone = True
        self._stop()

    def fail(self, error: ApiError) -> None:
        """End the request with an error that does not come from the core."""
        self.failure = error
        self._stop()

    def _stop(self) -> None:
        self.close()
        if self.on_stop is not None:
            self.on_stop()
        self.deliver()

    def close(self) -> None:
        """Abort what still runs. Safe to call again."""
        running = [stream.number for stream in self.streams if stream.ended is None]
        self.streams, self.news = [], []
        if running:
            self.abort(running)
        self._on_close(self)

    @property
    def unsent_tokens(self) -> int:
        return sum(len(stream.tokens) for stream in self.streams)
