"""The admin process's end of its conversation with the core."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import structlog
import zmq
import zmq.asyncio

from common.wire import MAX_MESSAGE_BYTES, AdminAlive, Message, Outcome, Roster, WireError, decode, encode
from scheduler_svc.http.errors import unavailable
from scheduler_svc.http.questions import Questions

log = structlog.get_logger()

IDENTITY = b"admin"
ALIVE_S = 1.0

Answer = Outcome | Roster


class AdminLink:
    """`open`, then `ask`, then `close`."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._questions: Questions[Answer] = Questions()

    def open(self) -> None:
        """Dial the core; it need not be there yet."""
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, IDENTITY)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.connect(self._address)
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._read()), loop.create_task(self._show_life())]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close()
        self._context.term()

    async def ask(self, question: Callable[[int], Message]) -> Answer:
        """The core's answer to a question, which is made for its number. Raises `ApiError` 503 when none comes soon."""

        async def send(number: int) -> None:
            try:
                await self._socket.send(encode(question(number)), zmq.NOBLOCK)
            except zmq.Again:
                raise unavailable("the scheduler does not answer", "no_scheduler") from None

        return await self._questions.ask(send)

    async def _show_life(self) -> None:
        """Each second: tell the core that this loop turns."""
        while True:
            with contextlib.suppress(zmq.Again):
                await self._socket.send(encode(AdminAlive(len(self._questions))), zmq.NOBLOCK)
            await asyncio.sleep(ALIVE_S)

    async def _read(self) -> None:
        """Give each answer to whom it is for; one that nobody waits for any more is dropped."""
        while True:
            parts = await self._socket.recv_multipart()
            try:
                message = decode(parts[-1])
            except WireError as error:
                log.warning("junk from the core dropped", error=str(error))
                continue
            if isinstance(message, Outcome | Roster):
                self._questions.take(message.number, message)
