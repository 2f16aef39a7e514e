"""A client of many streams in one process: it reads what comes, counts it, and asks for the server's health meanwhile.

It must take no more than its share of the machine that it has in common with the server, so it works on the sockets
themselves: chunked framing (RFC 9112, section 7.1) and events are taken apart, but an event's JSON is not parsed.
"""

from __future__ import annotations

import argparse
import json
import select
import socket
import sys
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import numpy as np
import psutil

HEALTH_S = 0.02
PAUSE_S = 0.001
"""Between two looks at the sockets. Woken by each packet, the client would take the processor from the server in the
middle of its writes, as none does that is on another machine.
"""
CONNECT_AT_ONCE = 64
"""Streams that are begun before the answers of others are read again."""
BUFFER_BYTES = 1 << 18
MAX_BEGIN_S = 120.0
"""What the streams may take until each has text."""
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
MARKS = {"completions": b'"text":"', "chat": b'"content":"'}
"""What stands before the text of an event."""


class ClientError(Exception):
    """The server sent what it must not."""


class Answers:
    """The answers that come on one connection, one after another."""

    def __init__(self, mark: bytes) -> None:
        self._mark, self._held = mark, b""
        self._in_body = False
        self.events = self.characters = 0
        """Events with text, and what text they held."""

    def take(self, data: bytes) -> bool:
        """Work off what came. Returns whether an answer has ended. Raises `ClientError`."""
        held, place, ended = self._held + data if self._held else data, 0, False
        while True:
            if not self._in_body:
                end = held.find(b"\r\n\r\n", place)
                if end < 0:
                    break
                self._check_head(held[place:end])
                place, self._in_body = end + 4, True
            line = held.find(b"\r\n", place)
            if line < 0:
                break
            size = int(held[place:line], 16)
            end = line + 2 + size
            if len(held) < end + 2:
                break
            if size:
                self._count(held[line + 2 : end])
            else:
                self._in_body, ended = False, True
            place = end + 2
        self._held = held[place:]
        return ended

    def _check_head(self, head: bytes) -> None:
        if not head.startswith(b"HTTP/1.1 200 ") or b"chunked" not in head.lower():
            raise ClientError(f"no streamed answer: {head.decode('latin-1')}")

    def _count(self, body: bytes) -> None:
        """A chunk of the body, which holds whole events."""
        mark = self._mark
        for event in body.split(b"\n\n")[:-1]:
            start = event.find(mark) + len(mark)
            if start < len(mark):
                if b"[DONE]" in event or b'"delta":{}' in event:
                    continue
                raise ClientError(f"unexpected event: {event[:400].decode()}")
            length = event.find(b'"', start) - start
            if length:
                self.events += 1
                self.characters += length


@dataclass
class Health:
    """Asks each `HEALTH_S` on a connection of its own. A question that would have been asked while one was unanswered
    counts with what was left of that wait.
    """

    connection: socket.socket
    request: bytes
    due: float
    sent: float | None = None
    held: bytes = b""
    """Of an answer that is not whole yet."""
    latencies: list[float] = field(default_factory=list)

    def turn(self, now: float) -> None:
        if self.sent is None and now >= self.due:
            self.connection.send(self.request)
            self.sent, self.due = now, now + HEALTH_S

    def take(self, data: bytes) -> None:
        self.held += data
        head, ended, body = self.held.partition(b"\r\n\r\n")
        if not ended or len(body) < int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]):
            return
        if not head.startswith(b"HTTP/1.1 200 "):
            raise ClientError(f"not healthy: {self.held.decode('latin-1')}")
        assert self.sent is not None
        waited_s = time.perf_counter() - self.sent
        while waited_s > 0:
            self.latencies.append(waited_s)
            waited_s -= HEALTH_S
        self.held, self.sent = b"", None


class Load:
    """So many streams at a time: one that has ended is asked for again."""

    def __init__(self, url: str, streams: int, api: str, max_tokens: int) -> None:
        parts = urlsplit(url)
        self._address = parts.hostname or "127.0.0.1", parts.port or 80
        self._api, self._max_tokens = api, max_tokens
        self._poll = select.epoll()
        self._buffer = bytearray(BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._connections: dict[int, socket.socket] = {}
        self._answers: dict[int, Answers] = {}
        self._requests: dict[int, bytes] = {}
        probe = self._connect()
        question = f"GET /health/live HTTP/1.1\r\nHost: {self._address[0]}\r\n\r\n".encode()
        self.health = Health(probe, question, time.perf_counter())
        self._probe = probe.fileno()
        for number in range(streams):
            self._begin(number)
            if number % CONNECT_AT_ONCE == CONNECT_AT_ONCE - 1:
                self.turn()

    def _connect(self) -> socket.socket:
        connection = socket.create_connection(self._address)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connections[connection.fileno()] = connection
        self._poll.register(connection.fileno(), select.EPOLLIN)
        return connection

    def _begin(self, number: int) -> None:
        place = self._connect().fileno()
        body = {"max_tokens": self._max_tokens, "ignore_eos": True, "stream": True, "temperature": 0, "seed": number}
        if self._api == "chat":
            body["messages"] = [{"role": "user", "content": f"Tell me number {number}."}]
        else:
            body["prompt"] = [20 + number // 1000, 20 + number % 1000, 21]
        content = json.dumps(body).encode()
        head = f"POST {PATHS[self._api]} HTTP/1.1\r\nHost: {self._address[0]}\r\nContent-Type: application/json\r\n"
        self._requests[place] = f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content
        self._answers[place] = Answers(MARKS[self._api])
        self._connections[place].sendall(self._requests[place])

    def turn(self) -> None:
        """Wait for something to read, at most until the next question of health is due, and read it all."""
        time.sleep(PAUSE_S)
        health, view = self.health, self._view
        wait_s = max(0.0, health.due - time.perf_counter()) if health.sent is None else HEALTH_S
        for place, _ in self._poll.poll(wait_s):
            size = self._connections[place].recv_into(view)
            if not size:
                raise ClientError("the server has closed a connection")
            data = bytes(view[:size])
            if place == self._probe:
                health.take(data)
            elif self._answers[place].take(data):
                self._connections[place].sendall(self._requests[place])
        health.turn(time.perf_counter())

    def totals(self) -> tuple[int, int]:
        """Characters and events of all streams so far."""
        answers = self._answers.values()
        return sum(answer.characters for answer in answers), sum(answer.events for answer in answers)

    def all_begun(self) -> bool:
        return all(answer.events for answer in self._answers.values())


def measure(load: Load, seconds: float, width: int, processes: dict[str, list[psutil.Process]]) -> dict[str, object]:
    """Of so many seconds, from when every stream has text on. `width`: characters of a token."""
    deadline = time.perf_counter() + MAX_BEGIN_S
    while not load.all_begun():
        load.turn()
        if time.perf_counter() > deadline:
            raise ClientError(f"not all streams have begun after {MAX_BEGIN_S:g} s")
    load.health.latencies.clear()
    before, cpu_before, begun = load.totals(), _cpu_s(processes), time.perf_counter()
    while time.perf_counter() < begun + seconds:
        load.turn()
    took, after, cpu_after = time.perf_counter() - begun, load.totals(), _cpu_s(processes)
    tokens, events = (after[0] - before[0]) / width, after[1] - before[1]
    latencies = load.health.latencies or [seconds]
    return {
        "tokens_per_s": round(tokens / took),
        "chunks_per_s": round(events / took),
        "health_p99_ms": round(1000 * float(np.percentile(latencies, 99)), 2),
        "cpu_us_per_token": {name: round(1e6 * (cpu_after[name] - cpu_before[name]) / tokens, 1) for name in cpu_after},
    }


def _cpu_s(processes: dict[str, list[psutil.Process]]) -> dict[str, float]:
    times = {name: [process.cpu_times() for process in group] for name, group in processes.items()}
    return {name: sum(time.user + time.system for time in group) for name, group in times.items()}


def main() -> int:
    """Print one JSON object. `--pids` are those of the processes whose CPU time counts, by name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", required=True)
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--api", choices=tuple(PATHS), default="completions")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--max-tokens", type=int, default=8000)
    parser.add_argument("--width", type=int, required=True, help="characters of each token")
    parser.add_argument("--pids", type=json.loads, default={}, help="JSON: lists of process ids by name")
    options = parser.parse_args()
    groups = {name: [psutil.Process(pid) for pid in pids] for name, pids in options.pids.items()}
    try:
        load = Load(options.url, options.streams, options.api, options.max_tokens)
        found = measure(load, options.seconds, options.width, {**groups, "client": [psutil.Process()]})
    except (ClientError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
