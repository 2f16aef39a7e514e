"""HTTP as odd clients speak it: offers to upgrade, what is no HTTP, endless heads, and bodies that fill the memory."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from frontend_service import BYTE_LEVEL, Service, error_of, run_service, wait_until

BODY = json.dumps({"model": BYTE_LEVEL, "prompt": "Hello", "max_tokens": 1}).encode()
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAA\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
FIXED = b"Content-Length: %d\r\n\r\n" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
IN_CHUNKS = b"%x\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (9, BODY[:9], len(BODY) - 9, BODY[9:])


class Connection:
    """A bare connection whose answers are read one by one."""

    def __init__(self, service: Service) -> None:
        address = urlsplit(service.url)
        self.socket = socket.create_connection((address.hostname, address.port), timeout=60)
        self._unread = b""

    def send(self, *parts: bytes) -> None:
        for part in parts:
            self.socket.sendall(part)

    def answer(self) -> httpx.Response:
        """The next answer with a Content-Length."""
        while b"\r\n\r\n" not in self._unread:
            self._receive()
        head, self._unread = self._unread.split(b"\r\n\r\n", 1)
        first, *lines = head.decode().split("\r\n")
        headers = [tuple(line.split(": ", 1)) for line in lines]
        length = int(dict(headers)["content-length"])
        while len(self._unread) < length:
            self._receive()
        content, self._unread = self._unread[:length], self._unread[length:]
        return httpx.Response(int(first.split()[1]), headers=headers, content=content)

    def _receive(self) -> None:
        data = self.socket.recv(65536)
        assert data, f"closed after {self._unread!r}"
        self._unread += data

    def is_closed(self) -> bool:
        return self.socket.recv(65536) == b""


@contextmanager
def connected(service: Service) -> Iterator[Connection]:
    connection = Connection(service)
    with connection.socket:
        yield connection


# --- upgrades ---


@pytest.mark.parametrize("cut", [0, 1, 30, 300, -1])
@pytest.mark.parametrize("body", [FIXED + BODY, CHUNKED + IN_CHUNKS], ids=["length", "chunked"])
def test_an_offer_to_upgrade_is_passed_over_and_the_body_is_read(service: Service, body: bytes, cut: int) -> None:
    request = POST + H2C + body
    with connected(service) as connection:
        connection.send(request[:cut] if cut else b"", request[cut:])
        assert connection.answer().status_code == 200
        # The connection goes on, with requests of either kind.
        connection.send(POST + FIXED + BODY)
        assert connection.answer().status_code == 200
        connection.send(request + b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + H2C + b"\r\n" + request)
        assert [connection.answer().status_code for _ in range(3)] == [200, 200, 200]
    assert [request.prompt.tolist() for request in service.core.requests] == [service.ids("Hello")] * 4


def test_a_websocket_is_not_spoken(service: Service) -> None:
    with connected(service) as connection:
        connection.send(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n")
        connection.send(b"Connection: upgrade\r\nUpgrade: websocket\r\n\r\n")
        answer = connection.answer()
        assert answer.status_code == 200 and len(answer.json()["data"]) == 2


def test_what_follows_a_body_changes_no_header(service: Service) -> None:
    """Trailers come when the request was judged already."""
    with connected(service) as connection:
        connection.send(POST + b"X-Tenant: a\r\n" + CHUNKED + IN_CHUNKS[:-2] + b"X-Tenant: b\r\n\r\n")
        assert connection.answer().status_code == 200
    assert service.core.requests[-1].tenant == "a"


# --- no HTTP ---


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 100,
        b"hello\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"CONNECT example.org:443 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        POST + CHUNKED + b"zz\r\n",
    ],
    ids=["tls", "text", "negative", "two lengths", "connect", "bad chunk"],
)
def test_what_is_no_http_gets_an_error_in_our_shape(service: Service, request_bytes: bytes) -> None:
    with connected(service) as connection:
        connection.send(request_bytes)
        assert error_of(connection.answer(), 400)["code"] == "invalid_http"
        assert connection.is_closed()
    assert service.get("/health").status_code == 200


def test_a_head_without_end_is_refused(service: Service) -> None:
    with connected(service) as connection:
        connection.send(POST + b"X-Long: ")
        with pytest.raises(ConnectionError):
            for _ in range(10_000):
                connection.send(b"x" * 4096)
    with connected(service) as connection:
        connection.send(POST + b"X-Long: " + b"x" * 30_000 + b"\r\n" + FIXED + BODY)
        assert connection.answer().status_code == 200


def test_a_head_that_does_not_come_is_not_waited_for(narrow: Service) -> None:
    with connected(narrow) as silent, connected(narrow) as slow, connected(narrow) as busy:
        slow.send(POST)
        busy.send(POST + FIXED + BODY)
        assert busy.answer().status_code == 200
        for connection in (silent, slow):
            assert error_of(connection.answer(), 408)["code"] == "client_timeout"
            assert connection.is_closed()
        busy.send(POST + FIXED + BODY, POST[:9])
        assert [busy.answer().status_code for _ in range(2)] == [200, 408]


def test_the_rest_of_an_answered_body_is_not_waited_for_for_ever(narrow: Service) -> None:
    head = b"POST /nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\n"
    with connected(narrow) as stuck, connected(narrow) as late:
        for connection in (stuck, late):
            connection.send(head)
            assert connection.answer().status_code == 404
            connection.send(b"x")
        late.send(b"yyyy", POST + FIXED + BODY, head)
        assert [late.answer().status_code for _ in range(2)] == [200, 404]
        late.send(b"yyyyy")
        assert stuck.is_closed()
        assert late.answer().status_code == 408 and late.is_closed(), "idle behind a late body"


# --- bodies ---


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One that holds a megabyte of bodies, and waits two seconds for the next bytes of one."""
    flags = ("--max-body-mb", "1", "--max-bodies-mb", "1", "--stalled-client-s", "2")
    with run_service(tmp_path_factory.mktemp("ipc"), *flags) as service:
        yield service


def test_bodies_are_bounded_together(narrow: Service) -> None:
    large = BODY[:-1] + b" " * 700_000 + b"}"
    head = POST + b"Content-Length: %d\r\n\r\n" % len(large)
    with connected(narrow) as first, connected(narrow) as second:
        first.send(head, large[:600_000])
        wait_until(lambda: narrow.raw("/v1/completions", large).status_code == 503)
        second.send(head, large)
        answer = second.answer()
        assert error_of(answer, 503)["code"] == "overloaded" and answer.headers["retry-after"] == "1"
        assert narrow.raw("/v1/completions", BODY).status_code == 200, "a small one has room"
        first.send(large[600_000:])
        assert first.answer().status_code == 200
        assert narrow.raw("/tokenize", large).status_code == 200
        # What an announced body might hold is not taken.
        second.send(head)
        assert narrow.raw("/v1/completions", large).status_code == 200


def test_a_body_that_stops_coming_gives_its_room_back(narrow: Service) -> None:
    large = BODY[:-1] + b" " * 700_000 + b"}"
    with connected(narrow) as stuck, connected(narrow) as gone:
        stuck.send(POST + b"Content-Length: %d\r\n\r\n" % len(large), large[:600_000])
        gone.send(POST + b"Content-Length: %d\r\n\r\n" % len(large), large[:300_000])
        time.sleep(0.3)  # who asks before both have come may take the room that they are to hold
        wait_until(lambda: narrow.raw("/v1/completions", large).status_code == 503)
        gone.socket.close()
        assert error_of(stuck.answer(), 408)["code"] == "client_timeout"
        assert stuck.is_closed()
    wait_until(lambda: narrow.raw("/v1/completions", large).status_code == 200)


def test_the_time_limit_bounds_a_body_that_trickles(narrow: Service) -> None:
    with connected(narrow) as slow:
        slow.send(POST + b"X-Request-Timeout: 0.2\r\n" + FIXED + BODY[:5])
        answer = slow.answer()
        assert error_of(answer, 504)["code"] == "request_timeout" and answer.headers["connection"] == "close"
        assert slow.is_closed()


# --- many requests at once ---


def resident_mb(service: Service) -> float:
    """Memory of the frontend."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{service.process.pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def test_requests_that_wait_on_their_connection_are_few(service: Service) -> None:
    """Who sends ever more of them and reads no answer takes no more memory than what was read at a time."""
    several = b"GET /nothing HTTP/1.1\r\nHost: localhost\r\n\r\n" * 10_000
    before = resident_mb(service)
    with connected(service) as connection:
        connection.socket.settimeout(3)
        with pytest.raises(TimeoutError):
            while True:
                connection.send(several)
        assert resident_mb(service) - before < 60
        assert httpx.get(service.url + "/health").status_code == 200


def test_each_of_many_requests_at_once_is_answered(service: Service) -> None:
    count = 300
    requests = [POST + b"X-Request-Id: r%d\r\n" % i + FIXED + BODY for i in range(count)]
    with connected(service) as connection:
        connection.send(b"".join(requests))
        answers = [connection.answer() for _ in range(count)]
    assert [answer.status_code for answer in answers] == [200] * count
    assert [answer.headers["x-request-id"] for answer in answers] == [f"r{i}" for i in range(count)]


# --- lengths ---


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/files"])
def test_zeros_before_a_length_are_passed_over(service: Service, path: str) -> None:
    with connected(service) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: ".encode()
        connection.send(head + b"0" * 5000 + b"%d\r\n\r\n" % len(BODY) + BODY)
        assert connection.answer().status_code == (200 if "completions" in path else 400)
