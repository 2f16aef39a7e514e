"""The socket where other executors read blocks: where it is bound, who reaches it, and how it is dialled."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import zmq

from common.sockets import give_up_the_dead, set_up
from executor_svc.sockets import is_local

CHUNK_BYTES = 4 << 20
"""KV in one message, as long as a block is no larger."""
SILENCE_MS = 2000
"""A source that says nothing for so long is given up."""
HIGH_WATER_MARK = 16
REQUEST_BYTES = 4096
"""No request is larger."""


@dataclass(frozen=True)
class TransferSocket:
    """How this executor takes part in hand-overs."""

    bind: str
    """tcp://HOST:PORT (`*`: a free port) or ipc://PATH (absolute); the address that others dial."""
    secret_key: bytes = b""
    """This executor's secret CURVE key in Z85; empty: no encryption."""

    @property
    def public_key(self) -> bytes:
        return zmq.curve_public(self.secret_key) if self.secret_key else b""

    def open(self, context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
        """Bind. Any client may connect: it reads nothing without the secret of a ticket. Raises zmq.ZMQError."""
        with set_up(context, zmq.ROUTER) as router:
            _bound(router)
            router.setsockopt(zmq.MAXMSGSIZE, REQUEST_BYTES)
            router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            if self.secret_key:
                router.curve_server = True
                router.curve_secretkey, router.curve_publickey = self.secret_key, self.public_key
            router.bind(self.bind)
        return router

    def dial(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, key: bytes, max_bytes: int
    ) -> zmq.Socket[bytes]:
        """Connect to another executor's socket with this public key. Raises zmq.ZMQError, ValueError."""
        with set_up(context, zmq.DEALER) as dealer:
            _bound(dealer)
            dealer.setsockopt(zmq.MAXMSGSIZE, max_bytes)
            dealer.setsockopt(zmq.RECONNECT_IVL, 50)
            if key:
                secret = self.secret_key or zmq.curve_keypair()[1]
                dealer.curve_serverkey = key
                dealer.curve_secretkey, dealer.curve_publickey = secret, zmq.curve_public(secret)
            dealer.connect(address)
        return dealer


def _bound(peer: zmq.Socket[bytes]) -> None:
    peer.linger = 0
    peer.set_hwm(HIGH_WATER_MARK)
    give_up_the_dead(peer)
    peer.setsockopt(zmq.HANDSHAKE_IVL, SILENCE_MS)
    peer.setsockopt(zmq.CONNECT_TIMEOUT, SILENCE_MS)


def place_of(address: str) -> bytes:
    """16 bytes that are the same for all processes that reach a local address; empty for an address of the network."""
    if not is_local(address):
        return b""
    try:
        machine, realm = Path("/proc/sys/kernel/random/boot_id").read_text(), _realm(address)
    except OSError:
        machine, realm = socket.gethostname(), ""
    return blake2b(f"{machine} {realm}".encode(), digest_size=16).digest()


def _realm(address: str) -> str:
    """What processes of a machine must share to reach a local address: containers have each a loopback of their own,
    and perhaps some folders in common. Raises OSError.
    """
    if address.startswith("tcp://"):
        return str(Path("/proc/self/ns/net").readlink())
    folder = Path(address.removeprefix("ipc://")).absolute().parent
    status = folder.stat()
    return f"{folder} {status.st_dev} {status.st_ino}"
