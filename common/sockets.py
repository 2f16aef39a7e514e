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
