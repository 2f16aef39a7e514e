"""An HTTP/1.1 parser for which a wish to change protocols is a header like any other.

httptools reads no HTTP behind a head with `Connection: Upgrade`: the body would be lost, and with it each request of a
client that offers HTTP/2 in this way (Java's, for one).
"""

from __future__ import annotations

from typing import Any

import httptools

FRAMING = (b"content-length", b"transfer-encoding")


class PlainParser:
    """Calls a protocol as `httptools.HttpRequestParser` does.

    Where that one stops, another parser takes over. It is told a head with the same framing and without the wish, of
    which the protocol hears nothing, and reads the body and what follows. The protocol must pass over the
    end of message that comes while `wants_upgrade` holds.
    """

    def __init__(self, protocol: Any) -> None:
        self._protocol = protocol
        self._parser = _parser(protocol)
        self.get_http_version = self._parser.get_http_version
        self.get_method = self._parser.get_method
        self.should_keep_alive = self._parser.should_keep_alive

    def feed_data(self, data: bytes) -> None:
        """Raises `httptools.HttpParserError`."""
        while True:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                self._take_over()

    def should_upgrade(self) -> bool:
        return False

    def wants_upgrade(self) -> bool:
        """Whether the request that is being read wishes to, and its body is still to come."""
        wants: bool = self._parser.should_upgrade()
        return wants

    def _take_over(self) -> None:
        headers = [(name, value) for name, value in self._protocol.headers if name in FRAMING]
        lines = [b"POST / HTTP/" + self.get_http_version().encode(), *(b"%b: %b" % header for header in headers)]
        listener = _Listener(self._protocol)
        self._parser = _parser(listener)
        self.get_http_version = self._parser.get_http_version
        self.get_method = self._parser.get_method
        self.should_keep_alive = self._parser.should_keep_alive
        self._parser.feed_data(b"\r\n".join([*lines, b"", b""]))
        listener.hears_heads = True


class _Listener:
    """Passes on what a parser finds, but for the head that it was told."""

    def __init__(self, protocol: Any) -> None:
        self._protocol = protocol
        self.hears_heads = False
        self.on_body, self.on_message_complete = protocol.on_body, protocol.on_message_complete

    def on_message_begin(self) -> None:
        if self.hears_heads:
            self._protocol.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if self.hears_heads:
            self._protocol.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.hears_heads:
            self._protocol.on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.hears_heads:
            self._protocol.on_headers_complete()


def _parser(protocol: Any) -> Any:
    parser = httptools.HttpRequestParser(protocol)
    # As uvicorn has it: a pipelined request may follow one that closes.
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser
