"""Frontends that look for streams at each other: all clients at once, and a frontend that does not answer."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop

from scheduler_svc.frontend.resuming import peers as module
from scheduler_svc.frontend.resuming.keeper import Keeper
from scheduler_svc.frontend.resuming.kept_stream import PIECE_BYTES, StreamReading
from scheduler_svc.frontend.resuming.peers import Peers
from scheduler_svc.http.errors import ApiError

LONG = 1 << 30


@asynccontextmanager
async def two_frontends(folder: Path) -> AsyncIterator[tuple[Peers, Keeper]]:
    """The one that asks, and what the other one keeps."""
    keepers = [Keeper(60.0, LONG) for _ in range(2)]
    peers = [Peers(f"ipc://{folder}/core.sock", f"frontend-{i}", keeper) for i, keeper in enumerate(keepers)]
    for one in peers:
        await one.open()
    try:
        yield peers[0], keepers[1]
    finally:
        for peer, keeper in zip(peers, keepers, strict=True):
            peer.close()
            keeper.close()


async def found(peers: Peers, name: str, after: int = 0) -> StreamReading:
    opened = await peers.find("tenant", [name])
    assert opened is not None
    reading = await opened(after)
    assert await reading.begin()
    return reading


def test_all_clients_that_come_back_at_once_find_their_streams(tmp_path: Path) -> None:
    """More of them than a listening socket's usual queue of connections has room for."""

    async def test() -> None:
        async with two_frontends(tmp_path) as (here, there):
            names = [str(i) for i in range(300)]
            for name in names:
                stream = there.add(("tenant", name), lambda: None)
                stream.append(b"data: %b\n\n" % name.encode(), LONG)
                stream.end()
            readings = await asyncio.gather(*(found(here, name) for name in names))
            told = [await reading.read() for reading in readings]
            assert told == [(b"id: 1\ndata: %b\n\n" % name.encode(), False) for name in names]
            for reading in readings:
                reading.leave()
            assert not here.readings

    uvloop.run(test())


@pytest.mark.parametrize("backlog", [0, 8], ids=["its queue is full", "it hangs"])
def test_a_frontend_that_does_not_answer_may_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backlog: int
) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.05)

    async def test() -> None:
        async with two_frontends(tmp_path) as (here, there):
            with socket.socket(socket.AF_UNIX) as hung, socket.socket(socket.AF_UNIX) as first:
                hung.bind(f"{tmp_path}/core.sock.frontend-2")
                hung.listen(backlog)
                first.connect(hung.getsockname())
                with pytest.raises(ApiError) as caught:
                    await here.find("tenant", ["lost"])
                assert (caught.value.status, caught.value.code) == (503, "peer_busy")
                assert caught.value.headers == {"retry-after": "1"}
                there.add(("tenant", "kept"), lambda: None).append(b"data: 1\n\n", LONG)
                assert await here.find("tenant", ["kept"]) is not None
            assert await here.find("tenant", ["lost"]) is None, "nobody listens there any more"

    uvloop.run(test())


def test_a_reader_holds_a_piece_of_a_long_stream_at_a_time(tmp_path: Path) -> None:
    async def test() -> None:
        async with two_frontends(tmp_path) as (here, there):
            stream = there.add(("tenant", "long"), lambda: None)
            event = b"data: %b\n\n" % (b"x" * 1000)
            stream.append(event * 500 + b"data: %b\n\n" % (b"y" * 3 * PIECE_BYTES), LONG)
            stream.end()
            for place in ("here", "at the other one"):
                reading = stream.open(100) if place == "here" else await found(here, "long", 100)
                pieces, more = [], True
                while more:
                    piece, more = await reading.read()
                    pieces.append(piece)
                whole = b"".join(b"id: %d\n%b" % (number, event) for number in range(101, 501))
                assert b"".join(pieces).startswith(whole) and pieces[-1].count(b"y") == 3 * PIECE_BYTES
                assert len(pieces) > 5
                assert max(map(len, pieces[:-1])) < PIECE_BYTES + 1100
                reading.leave()

    uvloop.run(test())
