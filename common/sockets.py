"""Setting a ZeroMQ socket up so that nothing of it is left when that fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import zmq

_watches = count()


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


def watch(socket: zmq.Socket[bytes], events: int) -> zmq.Socket[bytes]:
    """A socket that becomes readable when one of these happens to a connection of `socket`, and tells of it. Close it
    behind the end of the watch, `socket.monitor(None, 0)`.

    Not pyzmq's `get_monitor_socket`, whose queue has an end: when it is full, libzmq's thread waits for room, for all
    sockets of the context, and to end the watch then is to wait for ever.
    """
    address = f"inproc://events-{next(_watches)}"
    with set_up(socket.context, zmq.PAIR) as reader:
        reader.rcvhwm = 0
        socket.monitor(address, events)
        reader.connect(address)
    return reader
