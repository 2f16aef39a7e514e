"""A TCP relay between one executor and the scheduler: a network that can be broken at will."""

from __future__ import annotations

import asyncio
import contextlib
import random
from enum import StrEnum

RESEND_S = 0.2
"""How much later a lost piece of data arrives: TCP's shortest time until it sends again."""


class Weather(StrEnum):
    """What the relay does to what passes."""

    FAIR = "fair"
    CUT = "cut"
    """Connections are broken, for both sides, and new ones too."""
    HALF = "half"
    """Connections are broken for the scheduler alone. What the executor sends is swallowed."""
    FROZEN = "frozen"
    """Nothing passes; what waits does when the weather changes."""
    SLOW = "slow"
    """Each piece of data takes `delay_s` longer."""
    LOSSY = "lossy"
    """One piece of data in four comes `RESEND_S` late."""


class Relay:
    """Listens on a port of its own, and forwards to the scheduler's. Lives in one event loop."""

    def __init__(self, target_port: int, host: str = "127.0.0.1") -> None:
        self.host, self.port = host, 0
        self._target_port = target_port
        self.weather, self.delay_s = Weather.FAIR, 0.0
        self._changed = asyncio.Event()
        self._near: set[asyncio.StreamWriter] = set()
        self._far: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._draw = random.Random(self._target_port)

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, self.host, 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        self._server.close()
        self._break(self._near | self._far)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def set(self, weather: Weather, delay_s: float = 0.0) -> None:
        """Change the weather, now."""
        if self.weather is Weather.HALF:
            self._break(self._near)
        self.weather, self.delay_s = weather, delay_s
        if weather is Weather.CUT:
            self._break(self._near | self._far)
        elif weather is Weather.HALF:
            self._break(self._far)
        self._changed.set()
        self._changed = asyncio.Event()

    @staticmethod
    def _break(writers: set[asyncio.StreamWriter]) -> None:
        for writer in list(writers):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._near.add(writer)
        far: asyncio.StreamWriter | None = None
        try:
            await self._pass()
            if self.weather is Weather.CUT:
                return
            far_reader, far = await asyncio.open_connection("127.0.0.1", self._target_port)
            self._far.add(far)
            forth = asyncio.create_task(self._pump(reader, far))
            back = asyncio.create_task(self._pump(far_reader, writer))
            await asyncio.wait({forth, back}, return_when=asyncio.FIRST_COMPLETED)
            for pump in (forth, back):
                pump.cancel()
            await asyncio.gather(forth, back, return_exceptions=True)
            while self.weather is Weather.HALF and await reader.read(65536):
                pass
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._near.discard(writer)
            self._break({writer} if far is None else {writer, far})
            if far is not None:
                self._far.discard(far)
            self._tasks.discard(task)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                await self._pass()
                writer.write(data)
                await writer.drain()

    async def _pass(self) -> None:
        """Wait as long as the weather wants."""
        while self.weather in (Weather.FROZEN, Weather.HALF):
            await self._changed.wait()
        if self.weather is Weather.SLOW:
            await asyncio.sleep(self.delay_s)
        elif self.weather is Weather.LOSSY and self._draw.random() < 0.25:
            await asyncio.sleep(RESEND_S)
