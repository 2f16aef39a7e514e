"""Setting a ZeroMQ socket up so that nothing of it is left when that fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import zmq


@contextmanager
def set_up(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> Iterator[zmq.Socket[bytes]]:
    """A new socket, which stays open when the block ends, and is closed when it raises: one that is merely dropped
    lets the end of its context wait for ever.
    """
    socket = context.socket(kind)
    try:
        yield socket
    except BaseException:
        socket.close(linger=0)
        raise


def give_up_the_dead(socket: zmq.Socket[bytes]) -> None:
    """Let the kernel end TCP connections whose far side has gone without a word. Call it before bind or connect.

    Not ZeroMQ's heartbeats: libzmq (4.3.5) aborts the process where a ping is due, or comes, on a connection that broke
    while its input was stopped because nobody took what it had brought (docs/decisions/0014).
    """
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 15)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 5)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
    socket.setsockopt(zmq.TCP_MAXRT, 30_000)
