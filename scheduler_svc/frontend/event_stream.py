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
                body, more = await next_events(self._call, self._writer)
        except ClientGone:
            return
        finally:
            self._on_end()


async def next_events(call: Call, writer: ChunkWriter) -> tuple[bytes, bool]:
    """The next events, and whether more follow. Whatever goes wrong becomes the last. Raises `ClientGone`."""
    try:
        return await call.chunks(writer), not call.done
    except ClientGone:
        raise
    except ApiError as error:
        writer.add_error(error)
    except Exception:
        log.exception("stream failed")
        writer.add_error(internal())
    return writer.take(), False
