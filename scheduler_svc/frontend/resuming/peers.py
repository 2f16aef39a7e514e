"""Streams that other frontends of the service keep: looked for, and read, by Unix sockets beside that of the core."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections import defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import orjson
import structlog

from scheduler_svc.frontend.resuming.keeper import Keeper
from scheduler_svc.frontend.resuming.kept_stream import KeptStream, StreamReading, last_event
from scheduler_svc.http.errors import ApiError, ClientGone, unavailable
from scheduler_svc.http.patience import patience

log = structlog.get_logger()

PATIENCE_S = 1.0
"""For a peer to say whether it has a stream: one that hangs must not hold up who asks."""
ASKED_AT_ONCE, TURN_S = 64, 5.0
"""Searches at one peer, and how long another one waits for its turn. Where a network comes back, all clients do at
once; patience is to be with the peer, not with this process.
"""
BUSY_S = 0.01
"""Before a peer is dialled again whose queue of connections is full."""
BACKLOG = 4096
"""Of connections that wait to be accepted."""
UNSURE = "A process that may keep the stream does not answer now: ask again."
LOST = last_event(ApiError(503, "The process that kept the stream has gone.", kind="service_unavailable", code="lost"))
BROKEN = (OSError, EOFError)
"""The far side has gone; EOFError is that of `readexactly`."""
GONE = (FileNotFoundError, ConnectionRefusedError, ConnectionResetError, BrokenPipeError)
"""There is no process behind a socket, or it has just ended: what it kept is lost."""
_HEAD = struct.Struct("<?I")
"""Before what is sent: whether more follows, and how many bytes it has."""

Open = Callable[[int], Awaitable[StreamReading]]
"""Begin to read a stream that was found after an event. Raises `ApiError`."""


class Peers:
    """Finds a stream wherever it is kept, and lets other frontends find and read the streams of this one.

    A connection serves one search: the peer is told whose stream and which request ids, says when the stream that it
    has began, or that it has none, and when it is told after which event, sends the events.
    """

    def __init__(self, core_address: str, name: str, keeper: Keeper) -> None:
        """`name`: of this frontend; `core_address`: where the core's own socket is."""
        self._core = Path(core_address.removeprefix("ipc://"))
        self._path = self._core.with_name(f"{self._core.name}.{name}")
        self._keeper = keeper
        self._server: asyncio.Server | None = None
        self._turns: dict[Path, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(ASKED_AT_ONCE))
        self.readings: set[StreamReading] = set()
        """Those under way of streams that others keep."""

    async def open(self) -> None:
        """Listen to the others."""
        self._path.unlink(missing_ok=True)  # of one that was killed
        try:
            self._server = await asyncio.start_unix_server(self._serve, self._path, backlog=BACKLOG)
        except OSError as error:  # such as a path that is too long
            log.error("no other frontend can resume streams of this one", path=str(self._path), error=str(error))

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._path.unlink(missing_ok=True)

    # --- asking ---

    async def find(self, owner: str, ids: list[str]) -> Open | None:
        """The newest stream of an owner under the first of the ids that has one here or there.

        Raises `ApiError` 503 where none is found, but not all could be asked: a client takes 404 for the stream's end.
        """
        paths = [path for path in self._core.parent.glob(f"{self._core.name}.*") if path != self._path]
        told = await asyncio.gather(*(self._ask(path, owner, ids) for path in paths), return_exceptions=True)
        found = [peer for peer in told if isinstance(peer, _PeerReading)]
        here = self._keeper.find(owner, ids)
        newest = max(found, key=lambda peer: peer.started, default=None)
        if here is not None and (newest is None or here.started >= newest.started):
            newest = None
        for peer in found:
            if peer is not newest:
                peer.leave()
        if newest is not None:
            return newest.open
        if here is not None:
            return _opener(here)
        failure = next((one for one in told if isinstance(one, BaseException)), None)
        if failure is not None:
            log.warning("another frontend could not be asked for a stream", error=repr(failure))
            raise unavailable(UNSURE, "peer_busy", retry_after_s=1)
        return None

    async def _ask(self, path: Path, owner: str, ids: list[str]) -> _PeerReading | None:
        """What one peer has. Raises TimeoutError, OSError where that cannot be known."""
        try:
            async with patience(TURN_S), self._turns[path], patience(PATIENCE_S):
                reader, writer = await _dial(path)
                try:
                    _send_json(writer, [owner, ids])
                    started = await _receive_json(reader)
                except BaseException:
                    writer.transport.abort()
                    raise
        except (*GONE, EOFError):
            return None
        if started is not None:
            return _PeerReading(reader, writer, started, self.readings)
        writer.close()
        return None

    # --- being asked ---

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            owner, ids = await _receive_json(reader)
            stream = self._keeper.find(owner, ids)
            _send_json(writer, None if stream is None else stream.started)
            if stream is not None:
                await _send_stream(stream, await _receive_json(reader), reader, writer)
        except (ClientGone, *BROKEN):
            pass
        finally:
            writer.close()


async def _dial(path: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Waits for room in the queue of connections."""
    while True:
        try:
            return await asyncio.open_unix_connection(path)
        except BlockingIOError:  # a Unix socket does not wait by itself
            await asyncio.sleep(BUSY_S)


def _opener(stream: KeptStream) -> Open:
    async def open_here(after: int) -> StreamReading:
        return stream.open(after)

    return open_here


async def _send_stream(
    stream: KeptStream, after: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    try:
        reading = stream.open(after)
    except ApiError as error:
        _send_json(writer, _error_fields(error))
        return
    reading.cut_off = writer.transport.abort
    watch = asyncio.get_running_loop().create_task(_leave_with(reader, reading))
    try:
        try:
            _send_json(writer, await reading.begin())
        except ApiError as error:
            _send_json(writer, _error_fields(error))
            return
        more = True
        while more:
            body, more = await reading.read()
            _send(writer, body, more=more)
            await writer.drain()
    finally:
        reading.leave()
        watch.cancel()


async def _leave_with(reader: asyncio.StreamReader, reading: StreamReading) -> None:
    """Leave when the far side does, which has nothing more to say."""
    with contextlib.suppress(OSError):
        await reader.read(1)
    reading.leave()


class _PeerReading:
    """A stream that a peer has, and then a `StreamReading` of it."""

    cut_off: Callable[[], object] | None = None

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, started: float, readings: set[StreamReading]
    ) -> None:
        """`readings`: has it while it is read."""
        self._reader, self._writer, self.started, self._readings = reader, writer, started, readings
        self._left = False

    async def open(self, after: int) -> StreamReading:
        self._readings.add(self)
        _send_json(self._writer, after)
        return self

    async def begin(self) -> bool:
        try:
            told = await _receive_json(self._reader)
        except BROKEN:
            self._check()
            raise ApiError(404, "The process that kept the stream has gone.", code="stream_not_found") from None
        if isinstance(told, bool):
            return told
        raise ApiError(told["status"], told["message"], **told["more"])

    async def read(self) -> tuple[bytes, bool]:
        try:
            return await _receive(self._reader)
        except BROKEN:
            self._check()
            return LOST, False

    def _check(self) -> None:
        if self._left:
            raise ClientGone

    def leave(self) -> None:
        self._left = True
        self._readings.discard(self)
        self._writer.transport.abort()


# --- what goes over the sockets ---


def _error_fields(error: ApiError) -> dict[str, Any]:
    more = {"kind": error.kind, "param": error.param, "code": error.code, "headers": error.headers}
    return {"status": error.status, "message": error.message, "more": more}


def _send(writer: asyncio.StreamWriter, data: bytes, *, more: bool) -> None:
    writer.write(_HEAD.pack(more, len(data)) + data)


def _send_json(writer: asyncio.StreamWriter, value: Any) -> None:
    _send(writer, orjson.dumps(value), more=True)


async def _receive(reader: asyncio.StreamReader) -> tuple[bytes, bool]:
    more, length = _HEAD.unpack(await reader.readexactly(_HEAD.size))
    return await reader.readexactly(length), more


async def _receive_json(reader: asyncio.StreamReader) -> Any:
    return orjson.loads((await _receive(reader))[0])
