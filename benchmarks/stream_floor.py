"""A server that streams events which it has ready: as fast as this machine and the client can, whatever is served.

To every `POST` it answers with the same event over and over, on all connections in turn, one write each; to every `GET`
with 200.
"""

from __future__ import annotations

import asyncio
import sys
from typing import ClassVar

import uvloop

from benchmarks.stream_client import PATHS

TEXT = "word "
_HEAD = '{"id":"%s-0123456789abcdef0123456789abcdef","object":"%s","created":1700000000,"model":"default_model",'
_CHOICE = '"choices":[{"index":0,%s,"logprobs":null,"finish_reason":null}]}'
EVENTS = {
    PATHS["completions"]: _HEAD % ("cmpl", "text_completion") + _CHOICE % f'"text":"{TEXT}"',
    PATHS["chat"]: _HEAD % ("chatcmpl", "chat.completion.chunk") + _CHOICE % f'"delta":{{"content":"{TEXT}"}}',
}
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
STREAMED = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Streaming(asyncio.Protocol):
    """One connection. `open` holds those that are written to: a reader that falls behind leaves it for a while."""

    open: ClassVar[dict[asyncio.Transport, bytes]] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport, self._chunk = transport, b""

    def connection_lost(self, error: Exception | None) -> None:
        self.open.pop(self._transport, None)

    def data_received(self, data: bytes) -> None:
        method, path = data.split(b" ", 2)[:2]
        if method == b"GET":
            self._transport.write(OK)
            return
        event = f"data: {EVENTS[path.decode()]}\n\n".encode()
        self._chunk = b"%x\r\n%b\r\n" % (len(event), event)
        self._transport.write(STREAMED)
        self.open[self._transport] = self._chunk

    def pause_writing(self) -> None:
        self.open.pop(self._transport, None)

    def resume_writing(self) -> None:
        self.open[self._transport] = self._chunk


async def serve() -> None:
    server = await asyncio.get_running_loop().create_server(Streaming, "127.0.0.1", 0, backlog=2048)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    while True:
        for transport, chunk in list(Streaming.open.items()):
            transport.write(chunk)
        await asyncio.sleep(0 if Streaming.open else 0.001)


if __name__ == "__main__":
    try:
        uvloop.run(serve())
    except KeyboardInterrupt:
        sys.exit(0)
