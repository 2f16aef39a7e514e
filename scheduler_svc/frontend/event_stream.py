"""The streamed answer of a call, as an ASGI application."""

from __future__ import annotations

from collections.abc import Callable

import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from scheduler_svc.frontend.call import Call
from scheduler_svc.frontend.sse import ChunkWriter
from scheduler_svc.http.errors import ApiError, ClientGone, internal

log = structlog.get_logger()

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class EventStream(Response):
    """Sends chunks as they come, all that has come at once. `first`: those that are there already."""

    def __init__(self, call: Call, writer: ChunkWriter, first: bytes, on_end: Callable[[], None]) -> None:
        super().__init__()
        self._call, self._writer, self._first, self._on_end = call, writer, first, on_end
        self._failed = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation = self._call.generation
        generation.cut_off = scope.get("gilir.cut_off")
        try:
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            body, more = self._first, not self._call.done
            while True:
                generation.sending = True
                await send({"type": "http.response.body", "body": body, "more_body": more})
                generation.sending = False
                if not more:
                    return
                body = await self._next()
                more = not (self._call.done or self._failed)
        except ClientGone:
            return
        finally:
            self._on_end()

    async def _next(self) -> bytes:
        """The next chunks. Whatever goes wrong becomes the stream's last event."""
        try:
            return await self._call.chunks(self._writer)
        except ClientGone:
            raise
        except ApiError as error:
            self._writer.add_error(error)
        except Exception:
            log.exception("stream failed")
            self._writer.add_error(internal())
        self._failed = True
        return self._writer.take()
