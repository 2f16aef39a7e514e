"""The link to the core: a ZeroMQ DEALER, read from the event loop, and the streams that are live on it."""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import structlog
import zmq

from common.wire import (
    MAX_MESSAGE_BYTES,
    Abort,
    Account,
    Ended,
    FrontendAlive,
    FrontendHello,
    Iterations,
    LogprobColumns,
    Message,
    PromptScores,
    Serving,
    Stats,
    Submit,
    SubmitCall,
    Tokens,
    WireError,
    decode,
    encode,
)
from scheduler_svc.frontend.inquiries import Inquiries, Watches
from scheduler_svc.frontend.streams import Generation, PromptScoreboard, Scores, Stream, tokens_by_stream
from scheduler_svc.http.errors import unavailable
from scheduler_svc.keys import ANYBODY, ApiKey

log = structlog.get_logger()

HIGH_WATER_MARK = 100_000
LINGER_MS = 200
READ_S, TELL_S = 0.001, 0.002
"""Messages are read for so long, and requests told of their news for so long, before all else gets a turn."""
HELLO_S = 1.0
STREAM_NUMBERS = 1 << 32


class CoreLink:
    """`open`, `submit`, `close`; the rest is told to generations and to `on_serving`."""

    def __init__(
        self, address: str, name: str, on_serving: Callable[[Serving], None], timeout_s: float, lost_s: float
    ) -> None:
        self._address, self._name, self._on_serving = address, name, on_serving
        self._timeout_s, self._lost_s = timeout_s, lost_s
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._streams: dict[int, Stream] = {}
        # A frontend that took its dead predecessor's name must not take its stream numbers.
        self._next_number = random.getrandbits(31)
        self._greeted = False
        self._turn_due = False
        self._told: deque[Generation] = deque()
        """Those with news."""
        self._unshared: list[Tokens] = []
        """Iterations without logprobs, read in this turn."""
        self._last_heard = self._tick_due = 0.0
        self.generations: set[Generation] = set()
        self.stats: Stats | None = None
        self.kept: Callable[[], tuple[int, int]] = lambda: (0, 0)
        """How many streams are kept for those who resume them, and their bytes."""
        self.inquiries = Inquiries(self._send)
        self.watches = Watches(self._send)

    # --- life ---

    def open(self) -> None:
        """Dial the core and say hello, again each second until it answers."""
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, self._name.encode())
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.connect(self._address)
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._call_turn)
        self._last_heard = self._loop.time() - self._timeout_s
        self._tick_later()
        self._send(FrontendHello(self._name))

    def close(self) -> None:
        if self._context is None:
            return
        self._timer.cancel()
        self._loop.remove_reader(self._fd)
        self._socket.close()
        self._context.term()
        self._context = None

    def _tick_later(self) -> None:
        self._tick_due = self._loop.time() + HELLO_S
        self._timer = self._loop.call_later(HELLO_S, self._tick)

    def _tick(self) -> None:
        """Each second: tell the core that this loop turns, give up on a core that has long been silent."""
        silence = self._silence_s()
        self._tick_later()
        if self._greeted and silence >= self._lost_s:
            log.error("the core is lost", silent_s=round(silence, 1))
            self._greeted = False
            self.fail_all("the scheduler does not answer")
        self._send(FrontendAlive(self.num_streams, *self.kept()) if self._greeted else FrontendHello(self._name))

    def fail_all(self, reason: str, code: str = "service_unavailable", *, submitted: bool = True) -> None:
        """End every open request with 503; unless `submitted`, only those that the core has not heard of."""
        for generation in list(self.generations):
            if submitted or not generation.streams:
                generation.fail(unavailable(reason, code))

    @property
    def alive(self) -> bool:
        """Whether the core has greeted this frontend, and was heard of lately."""
        return self._greeted and self._silence_s() < self._timeout_s

    def _silence_s(self) -> float:
        """Since when nothing came. What lies unread because this process was too busy to look at it has come; and what
        it, or its machine, stood still is no silence of the core. A request may ask before the tick does.
        """
        now = self._loop.time()
        self._last_heard = min(now, self._last_heard + max(0.0, now - self._tick_due))
        self._tick_due = max(now, self._tick_due)
        if self._loop.time() - self._last_heard >= self._timeout_s:
            self._receive()
            self._call_turn()
        return self._loop.time() - self._last_heard

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    # --- requests ---

    def generation(self, key: ApiKey = ANYBODY) -> Generation:
        """A request without streams yet. Its `close` must be called in the end."""
        generation = Generation(self._abort, self.generations.discard, key, self._told.append)
        self.generations.add(generation)
        return generation

    def submit(self, generation: Generation, requests: list[Submit]) -> None:
        """Send the requests of a call under fresh stream numbers. Raises `ApiError` 503 if the core is not there."""
        if not self.alive:
            raise unavailable("the scheduler does not answer")
        call = place = self._take_numbers(sum(request.n for request in requests))
        sent: list[Submit] = []
        for request in requests:
            limits = replace(request.limits, call=call) if request.limits.key else request.limits
            sent.append(replace(request, first_stream=place, limits=limits))
            place += request.n
            self._open_streams(generation, sent[-1])
        if not self._send(sent[0] if len(sent) == 1 else SubmitCall(tuple(sent))):
            raise unavailable("the scheduler does not keep up")

    def _open_streams(self, generation: Generation, request: Submit) -> None:
        scored = request.params.logprobs >= 0
        board = PromptScoreboard(request.prompt) if request.params.prompt_logprobs >= 0 else None
        for number in range(request.first_stream, request.first_stream + request.n):
            stream = Stream(generation, number, len(generation.streams), scored, board)
            self._streams[number] = stream
            generation.streams.append(stream)

    def _take_numbers(self, n: int) -> int:
        """The first of `n` consecutive numbers that no live stream has."""
        first = self._next_number
        while first + n > STREAM_NUMBERS or any(first + i in self._streams for i in range(n)):
            first = 0 if first + n > STREAM_NUMBERS else first + n
        self._next_number = first + n
        return first

    def _abort(self, numbers: list[int], *, stopped: bool = False) -> None:
        live = [number for number in numbers if self._streams.pop(number, None) is not None]
        if live:
            self._send(Abort(np.array(live, np.uint32), stopped))

    # --- messages ---

    def _send(self, message: Message) -> bool:
        if self._context is None:
            return False
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        # Sending may swallow the signal that there is something to read.
        self._call_turn()
        return True

    def _call_turn(self) -> None:
        if not self._turn_due:
            self._turn_due = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Read what has come, then tell the requests, and read on when all know: one that is told late hears more."""
        self._turn_due = False
        if self._context is None:
            return
        done = False
        try:
            read_all = not self._told and self._receive()
            done = self._deliver() and read_all
        finally:  # the socket signals each arrival once: what one request breaks must not leave others unread
            if not done:
                self._call_turn()

    def _receive(self) -> bool:
        """Read messages. Returns whether that was all there are."""
        end = time.monotonic() + READ_S
        try:
            while time.monotonic() < end:
                self._read(self._socket.recv_multipart(zmq.NOBLOCK)[-1])
        except zmq.Again:
            return True
        finally:
            self._share_out()
        return False

    def _read(self, data: bytes) -> None:
        try:
            self._handle(decode(data))
        except WireError as error:
            log.warning("junk from the core dropped", error=str(error))

    def _deliver(self) -> bool:
        """Tell requests of their news. Returns whether all have been."""
        told, end = self._told, time.monotonic() + TELL_S
        while told:
            told.popleft().deliver()
            if time.monotonic() >= end:
                break
        return not told

    def _handle(self, message: Message) -> None:
        if not isinstance(message, Tokens):
            self._share_out()  # what came before it
        match message:
            case Tokens() if len(message.logprobs.rows):
                self._share_out()
                self._take_scored(message)
            case Tokens():
                self._unshared.append(message)
            case Ended():
                self._take_ended(message)
            case PromptScores():
                stream = self._streams.get(message.stream)
                if stream is not None and stream.prompt_scores is not None:
                    stream.prompt_scores.add(message)
                    stream.tell()
            case Stats():
                self.stats = message
            case Account():
                self.inquiries.take(message)
            case Iterations():
                self.watches.take(message)
            case Serving():
                self._greeted = True
                self._on_serving(message)
            case _:
                log.warning("unexpected message from the core dropped", kind=type(message).__name__)
                return
        self._last_heard = self._loop.time()

    def _share_out(self) -> None:
        """Give the streams what was read for them, each all of it at once."""
        messages, self._unshared = self._unshared, []
        if not messages:
            return
        streams = self._streams
        for number, tokens in tokens_by_stream(messages):
            stream = streams.get(number)
            if stream is not None:
                stream.put(tokens)

    def _take_scored(self, message: Tokens) -> None:
        scores = _by_row(message.logprobs)
        for row, (number, token) in enumerate(zip(message.streams.tolist(), message.tokens.tolist(), strict=True)):
            stream = self._streams.get(number)
            if stream is not None:
                stream.put([token], scores.get(row))

    def _take_ended(self, message: Ended) -> None:
        stream = self._streams.pop(message.stream, None)
        if stream is not None:
            stream.ended = message
            stream.tell()


def _by_row(columns: LogprobColumns) -> dict[int, Scores]:
    """Each row's entries."""
    ids, values, found, place = columns.token_ids.tolist(), columns.values.tolist(), {}, 0
    for row, width in zip(columns.rows.tolist(), columns.widths.tolist(), strict=True):
        found[row] = (ids[place : place + width], values[place : place + width])
        place += width
    return found
