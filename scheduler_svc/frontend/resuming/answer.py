"""The answer to who reads a kept stream, as an ASGI application."""

from __future__ import annotations

from collections.abc import Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from scheduler_svc.frontend.event_stream import HEADERS
from scheduler_svc.frontend.resuming.kept_stream import StreamReading
from scheduler_svc.http.errors import ClientGone


async def answer_reading(reading: StreamReading, on_end: Callable[[], None]) -> Response:
    """Waits until the stream has begun. 204, by which the standard of server-sent events tells a client to ask no more,
    where it has been read to its end.

    Raises `ApiError` where the stream is an error, `ClientGone` when the client leaves.
    """
    try:
        if await reading.begin():
            return KeptAnswer(reading, on_end)
    except BaseException:
        reading.leave()
        on_end()
        raise
    reading.leave()
    on_end()
    return Response(status_code=204)


class KeptAnswer(Response):
    """Sends events as they come, all that have come at once. The stream goes on when its client leaves."""

    def __init__(self, reading: StreamReading, on_end: Callable[[], None]) -> None:
        super().__init__()
        self._reading, self._on_end = reading, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._reading.cut_off = scope.get("gilir.cut_off")
        try:
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            more = True
            while more:
                body, more = await self._reading.read()
                await send({"type": "http.response.body", "body": body, "more_body": more})
        except ClientGone:
            return
        finally:
            self._reading.leave()
            self._on_end()
