"""A server of the OpenAI API that says what a test tells it to."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, Any]
"""Status, and what is sent as JSON; an iterator is sent as events: (name, content) pairs, or contents."""


class Stub:
    """`replies`: by `METHOD /path`; `asked`: (the same, the body) of each request so far."""

    def __init__(self) -> None:
        self.replies: dict[str, Callable[[Any], Reply]] = {}
        self.asked: list[tuple[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.url = ""
        self.was_left = threading.Event()
        """A client has closed its connection in the middle of a stream."""
        self.say("GET /v1/models", 200, {"data": [{"id": "m"}]})

    def say(self, route: str, status: int, content: Any) -> None:
        self.replies[route] = lambda _: (status, content)

    def refuse(self, route: str, status: int, message: str) -> None:
        self.say(route, status, {"error": {"message": message}})


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    stub: Stub


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def _answer(self) -> None:
        stub = self.server.stub
        length = int(self.headers.get("content-length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        route = f"{self.command} {self.path}"
        stub.asked.append((route, body))
        stub.headers.append(dict(self.headers.items()))
        status, content = stub.replies[route](body) if route in stub.replies else (404, {})
        if isinstance(content, Iterator):
            self._stream(content)
            return
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_DELETE = _answer

    def _stream(self, events: Iterator[Any]) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        try:
            for event in events:
                name, content = event if isinstance(event, tuple) else ("", event)
                text = content if isinstance(content, str) else json.dumps(content)
                self.wfile.write((f"event: {name}\n" * bool(name) + f"data: {text}\n\n").encode())
        except OSError:
            self.server.stub.was_left.set()

    def log_message(self, *_arguments: object) -> None:
        pass


@contextmanager
def run_stub() -> Iterator[Stub]:
    stub = Stub()
    with _Server(("127.0.0.1", 0), _Handler) as server:
        server.stub = stub
        stub.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield stub
        server.shutdown()


def chat_events(pieces: Iterable[dict[str, str]], finish_reason: str = "stop") -> Iterator[Any]:
    """A chat's stream; each piece is a delta."""
    yield {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
    count = 0
    for delta in pieces:
        count += 1
        yield {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    yield {"choices": [{"index": 0, "delta": {}, "finish_reason": finish_reason}]}
    yield {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": count}}
    yield "[DONE]"
