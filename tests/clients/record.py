"""A proxy that writes down what a client sends: `python tests/clients/record.py --to http://127.0.0.1:8000 --out FILE`

Each request goes to Gilir and its answer back as they are, piece by piece. FILE gets one JSON object a line: method,
path, headers and body of every request whose shape (path, header names, fields of the body) was not there yet, and the
status of its answer. The files in `shapes` are picked from these by hand.
"""

from __future__ import annotations

import argparse
import http.client
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

HOP = {"host", "connection", "content-length", "transfer-encoding", "keep-alive"}
"""Headers of one connection only."""
PIECE = 65_536


class Record:
    """The file, and the shapes that stand in it."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self._known: set[str] = set()

    def add(self, method: str, path: str, headers: dict[str, str], body: bytes, status: int) -> None:
        parsed: Any = json.loads(body) if body else None
        shape = json.dumps([method, path, sorted(map(str.lower, headers)), fields_of(parsed), status])
        with self._lock:
            if shape in self._known:
                return
            self._known.add(shape)
            kept = {name.lower(): value for name, value in headers.items() if name.lower() not in HOP}
            row = {"method": method, "path": path, "headers": kept, "body": parsed, "status": status}
            with self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")


def fields_of(value: Any) -> Any:
    """The names of an object's fields with the kinds of their values; of a list, those of its first member."""
    if isinstance(value, dict):
        return {name: fields_of(value[name]) for name in sorted(value)}
    if isinstance(value, list):
        return [fields_of(value[0])] if value else []
    return type(value).__name__


def handler_for(target: str, record: Record) -> type[BaseHTTPRequestHandler]:
    """A handler that passes everything on to `target`, a base URL without a path."""
    address = urlsplit(target)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=600)
            headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP}
            connection.request(self.command, self.path, body or None, headers)
            answer = connection.getresponse()
            record.add(self.command, self.path, headers, body, answer.status)
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in HOP:
                    self.send_header(name, value)
            self.send_header("connection", "close")
            self.end_headers()
            while piece := answer.read1(PIECE):
                self.wfile.write(piece)
                self.wfile.flush()
            connection.close()
            self.close_connection = True

        do_GET = do_POST = do_DELETE = _pass_on

        def log_message(self, *_: object) -> None:
            return

    return Handler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", required=True, help="base URL of Gilir")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    server = ThreadingHTTPServer(("127.0.0.1", options.port), handler_for(options.to, Record(options.out)))
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
