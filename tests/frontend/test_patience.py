"""How long others may take to answer: their time, not that of a stall here."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
import uvloop

from scheduler_svc.http.patience import patience

RUNS = [pytest.param(uvloop.run, id="uvloop"), pytest.param(asyncio.run, id="asyncio")]


@pytest.mark.parametrize("run", RUNS)
def test_what_came_while_this_process_stood_still_is_heard(run: Callable[[Any], None]) -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)

            def stall() -> None:
                theirs.send(b"!")
                time.sleep(0.5)

            async with patience(0.1):
                loop.call_later(0.001, stall)
                assert await loop.sock_recv(ours, 1) == b"!"

    run(test())


@pytest.mark.parametrize("run", RUNS)
def test_it_ends(run: Callable[[Any], None]) -> None:
    async def test() -> None:
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            async with patience(0.1):
                await asyncio.Event().wait()
        assert time.monotonic() - began > 0.08, "uvloop counts whole milliseconds"

    run(test())
