"""How an executor's sockets are set up: bounded in every direction, and with keys where they are given."""

from __future__ import annotations

import contextlib
import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import zmq

from common.sockets import give_up_the_dead, set_up
from common.wire import MAX_MESSAGE_BYTES

LINGER_MS = 1000
"""How long a closed socket may still deliver its last messages."""
HIGH_WATER_MARK = 64
"""Messages queued either way. Between the two services there is one plan and one result at a time."""

WHY_FAILED = {
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): "the scheduler does not know this executor's key",
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): "one of the two uses keys, the other does not",
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "the scheduler has just ended, has another key than this executor was "
    "given for it, or does not speak ZeroMQ",
}
"""What a monitor's event of a failed handshake mostly means."""


@dataclass(frozen=True)
class Dialing:
    """Where the scheduler is and how to speak to it."""

    address: str
    """tcp://HOST:PORT or ipc://PATH."""
    timeout_s: float = 5.0
    """Silence after which the far side counts as lost."""
    server_key: bytes = b""
    """The scheduler's public CURVE key in Z85 (40 characters); empty: no encryption."""
    secret_key: bytes = b""
    """This executor's own secret CURVE key in Z85."""

    def open(self, context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
        """A DEALER that dials the scheduler and goes on dialing until it is closed."""
        with set_up(context, zmq.DEALER) as dealer:
            dealer.linger = LINGER_MS
            dealer.set_hwm(HIGH_WATER_MARK)
            dealer.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
            # Nothing queues up for a scheduler that is not there.
            dealer.setsockopt(zmq.IMMEDIATE, 1)
            dealer.setsockopt(zmq.RECONNECT_IVL, 100)
            dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
            timeout_ms = max(1, int(self.timeout_s * 1000))
            give_up_the_dead(dealer)
            # A far side that vanished in mid-handshake, or does not answer at all, is dialled anew as soon.
            dealer.setsockopt(zmq.HANDSHAKE_IVL, timeout_ms)
            dealer.setsockopt(zmq.CONNECT_TIMEOUT, timeout_ms)
            if self.server_key:
                dealer.curve_serverkey = self.server_key
                dealer.curve_secretkey = self.secret_key
                dealer.curve_publickey = zmq.curve_public(self.secret_key)
            dealer.connect(self.address)
        return dealer


def is_local(address: str) -> bool:
    """Whether an address stays on this machine: ipc, or tcp to a loopback address."""
    if not address.startswith("tcp://"):
        return True
    host = urlsplit(address).hostname or ""
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def read_key(path: str, kind: str) -> bytes:
    """One CURVE key of `kind` ("public" or "secret"), in Z85, from a certificate of zmq or a file with the bare key.

    Raises ValueError with one plain line when the file holds none, OSError when it cannot be read.
    """
    text = Path(path).read_text()
    named = re.search(rf"{kind}-key\s*=\s*\"([^\"]+)\"", text)
    key = named.group(1) if named else text.strip()
    if len(key) != 40 or any(c.isspace() for c in key):
        raise ValueError(f"{path}: holds no {kind} key of 40 characters")
    return key.encode("ascii", "replace")
