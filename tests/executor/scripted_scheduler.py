"""A scripted scheduler for tests of executors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

import zmq

from common.wire import Alive, Hello, Message, Welcome, decode, encode

M = TypeVar("M", bound=Message)


class ScriptedScheduler:
    """A ROUTER that answers heartbeats by itself; the test says the rest."""

    def __init__(self, port: int = 0, curve_secret_key: bytes = b"") -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        self.router.linger = 0
        if curve_secret_key:
            self.router.curve_server = True
            self.router.curve_secretkey = curve_secret_key
        self.port = port or self.router.bind_to_random_port("tcp://127.0.0.1")
        if port:
            self._bind_again(port)
        self.address = f"tcp://127.0.0.1:{self.port}"
        self.known_epochs: set[int] = set()
        self.echoes = True
        self.num_alive = self.num_hellos = 0
        self.peer = b""

    def _bind_again(self, port: int) -> None:
        """The port of an earlier scheduler may take a moment to come free."""
        deadline = time.monotonic() + 60
        while True:
            try:
                self.router.bind(f"tcp://127.0.0.1:{port}")
                return
            except zmq.ZMQError:
                if time.monotonic() > deadline:
                    raise
                threading.Event().wait(0.02)

    def close(self) -> None:
        self.router.close()
        self.context.term()

    def receive_any(self, timeout_s: float = 60.0) -> tuple[bytes, Message]:
        """The next message that is not a heartbeat, with its peer."""
        deadline = time.monotonic() + timeout_s
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or not self.router.poll(left * 1000):
                raise TimeoutError("no message came")
            peer, data = self.router.recv_multipart()
            received = decode(data)
            if not isinstance(received, Alive):
                return peer, received
            self.num_alive += 1
            if self.echoes:
                echo = received if received.epoch in self.known_epochs else Alive(0)
                self.router.send_multipart([peer, encode(echo)])

    def receive(self, kind: type[M], timeout_s: float = 60.0) -> M:
        """The next message; it must be of this kind. Repeated Hellos are passed over unless asked for."""
        while True:
            peer, received = self.receive_any(timeout_s)
            if isinstance(received, kind):
                if isinstance(received, Hello):
                    self.peer, self.num_hellos = peer, self.num_hellos + 1
                return received
            assert isinstance(received, Hello), f"expected {kind.__name__}, got {received}"

    def beat(self, until: Callable[[], object], timeout_s: float = 60.0) -> None:
        """Answer heartbeats until `until()` is true; nothing else may come."""
        deadline = time.monotonic() + timeout_s
        while not until():
            assert time.monotonic() < deadline, "it did not come true"
            try:
                _, received = self.receive_any(0.02)
            except TimeoutError:
                continue
            assert isinstance(received, Hello), f"unexpected {received}"

    def send(self, *messages: Message) -> None:
        for item in messages:
            self.router.send_multipart([self.peer, encode(item)])

    def send_raw(self, *frames: bytes) -> None:
        self.router.send_multipart([self.peer, *frames])

    def receive_hello(self, timeout_s: float = 60.0) -> Hello:
        return self.receive(Hello, timeout_s)

    def attach(self, epoch: int, heartbeat_ms: int = 50) -> None:
        """Welcome the executor that said Hello last."""
        self.known_epochs.add(epoch)
        self.send(Welcome(epoch, heartbeat_ms))

    def welcome(self, epoch: int, heartbeat_ms: int = 50) -> Hello:
        """Take the next Hello and attach the executor."""
        hello = self.receive_hello()
        self.attach(epoch, heartbeat_ms)
        return hello
