"""What a file holds, sent piece by piece: a file may be deleted, or the database go away, while it is on its way."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator

import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from scheduler_svc.batches.files import CHUNK_BYTES
from scheduler_svc.batches.records import FileRecord, Outcome
from scheduler_svc.batches.store import Store
from scheduler_svc.frontend.batching.access import ask
from scheduler_svc.http.errors import ApiError

log = structlog.get_logger()

CLOSE_S = 1.0


class Download(Response):
    """The content of a file, of the length that was promised; where the rest has gone, the connection breaks."""

    def __init__(self, file: FileRecord) -> None:
        name = re.sub(r"[^\w.-]", "_", file.filename, flags=re.ASCII)
        headers = {"content-length": str(file.bytes), "content-disposition": f'attachment; filename="{name}"'}
        super().__init__(headers=headers, media_type="application/octet-stream")
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, left = Request(scope, receive), self._file.bytes
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for piece in _pieces(request, self._file):
                if await request.is_disconnected():
                    return
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                left -= len(piece)
        except ApiError as error:
            log.info("a download breaks off", file=self._file.id, missing_bytes=left, reason=error.message)
        else:
            if not left:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                return
            log.info("a download breaks off", file=self._file.id, missing_bytes=left, reason="the file was deleted")
        await _break_off(scope, receive)


async def _break_off(scope: Scope, receive: Receive) -> None:
    """Close the connection, and wait until it is: the server takes an answer without an end for a fault of ours.

    Not for ever: where the client has sent a further request already, the server tells only that one of the end.
    """
    cut_off = scope.get("gilir.cut_off")
    if cut_off is None:
        return
    cut_off()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CLOSE_S):
            while (await receive())["type"] != "http.disconnect":
                pass


async def _pieces(request: Request, file: FileRecord) -> AsyncIterator[bytes]:
    """The content as far as it is there."""
    if file.batch_id is not None:
        assert file.outcome is not None
        last = -1
        while rows := await ask(request, _next_results, file.batch_id, Outcome(file.outcome), last):
            last = rows[-1][0]
            yield b"".join(result + b"\n" for _, result in rows)
        return
    for place in range(0, file.bytes, CHUNK_BYTES):
        piece = await ask(request, _read_chunk, file.id, place)
        if not piece:
            return
        yield piece


def _read_chunk(store: Store, file_id: str, place: int) -> bytes:
    return store.files.read(file_id, place, CHUNK_BYTES)


def _next_results(store: Store, batch_id: str, outcome: Outcome, after: int) -> list[tuple[int, bytes]]:
    return store.files.results(batch_id, outcome, after)
