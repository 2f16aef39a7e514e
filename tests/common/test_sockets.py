"""What watches a socket's connections does not hold it up."""

from __future__ import annotations

import socket

import zmq

from common.sockets import watch

NUM_EVENTS = 2500
"""More than the two queues hold that are a watch's unless it asks for more."""


def test_events_that_nobody_reads_hold_up_neither_the_socket_nor_its_end() -> None:
    """A flood of strangers would keep a scheduler from ending, and all its executors waiting."""
    with zmq.Context() as context, zmq.Context() as other:
        router = context.socket(zmq.ROUTER)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        watching = watch(router, zmq.EVENT_ACCEPTED)
        for _ in range(NUM_EVENTS):
            socket.create_connection(("127.0.0.1", port), timeout=20).close()
        dealer = other.socket(zmq.DEALER)
        dealer.connect(f"tcp://127.0.0.1:{port}")
        dealer.send(b"hello")
        assert router.poll(20_000)
        router.monitor(None, 0)
        for _ in range(NUM_EVENTS):
            watching.recv_multipart(zmq.NOBLOCK)
        for each in (watching, router, dealer):
            each.close(0)
