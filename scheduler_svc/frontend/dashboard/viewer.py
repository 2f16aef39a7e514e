"""The event stream of one viewer of the live page."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from common.wire import Stats
from scheduler_svc.frontend.client import ClientWatch
from scheduler_svc.frontend.dashboard.feed import Feed
from scheduler_svc.frontend.dashboard.rendering import (
    event,
    render_blocks,
    render_figures,
    render_lane,
    render_sequence,
    render_waiting,
)
from scheduler_svc.frontend.event_stream import HEADERS

MAX_BATCH = 128
"""Iterations in one event."""
MAX_BEHIND = 512
"""Iterations that a slow viewer may be behind; then it goes on with the newest ones."""


class Viewer(Response):
    """Events `rows` (iterations, the sequences new in them), `status` (lanes, blocks, queue, latency), `trouble`.

    It takes its place among the viewers when it is made, and gives it back when the stream ends.
    """

    def __init__(self, feed: Feed, tenant: str, stats: Callable[[], Stats | None], ending: Callable[[], bool]) -> None:
        """`tenant`: whose request ids are shown; empty: all. `ending`: whether the service stops.

        Raises `ApiError` 503 when too many watch.
        """
        super().__init__()
        feed.join()
        self._feed, self._tenant, self._stats, self._ending = feed, tenant, stats, ending
        self._after = 0
        """The last iteration that was sent."""
        self._is_up_to_date = False
        """It has been sent all that was kept when it came."""
        self._num_named = 0
        self._status = 0
        self._trouble = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.Event()
        watch = ClientWatch(receive, gone.set)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            while not (gone.is_set() or self._ending()):
                body = b"".join(self._news())
                if body:
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                if self._after >= self._feed.newest:
                    await self._feed.changed()
            with contextlib.suppress(OSError):
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            watch.close()
            self._feed.leave()

    def _news(self) -> Iterator[bytes]:
        """Events since the last call."""
        feed = self._feed
        if feed.failure != self._trouble:
            self._trouble = feed.failure
            yield event("trouble", orjson.dumps({"message": feed.failure}))
        if feed.status != self._status:
            self._status = feed.status
            yield event("status", self._render_status())
        if self._after < feed.newest or feed.num_named > self._num_named:
            yield event("rows", self._render_rows())

    def _render_rows(self) -> bytes:
        feed = self._feed
        start = max(self._after, feed.newest - MAX_BEHIND) if self._is_up_to_date else self._after
        first, rows = feed.rows_after(start, MAX_BATCH)
        names = [render_sequence(seen, self._tenant) for seen in feed.names_after(self._num_named)]
        self._after, self._num_named = first + len(rows) - 1, feed.num_named
        self._is_up_to_date = self._is_up_to_date or self._after == feed.newest
        return b'{"sequences":%s,"rows":[%s]}' % (orjson.dumps(names), b",".join(rows))

    def _render_status(self) -> bytes:
        feed = self._feed
        status = {
            "lanes": [render_lane(lane) for lane in feed.lanes],
            "blocks": [render_blocks(blocks) for blocks in feed.blocks],
            "waiting": [render_waiting(waiting, self._tenant) for waiting in feed.waiting],
            "num_waiting": feed.num_waiting,
            **render_figures(self._stats()),
        }
        return orjson.dumps(status, option=orjson.OPT_SERIALIZE_NUMPY)
