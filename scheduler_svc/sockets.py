"""The core's ZeroMQ sockets: bounded linger and queues, size limits, CURVE where keys are given."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from common.curve import warn_if_exposed
from common.sockets import give_up_the_dead, set_up, watch
from common.wire import MAX_MESSAGE_BYTES
from scheduler_svc.executor_keys import ExecutorKeys
from scheduler_svc.settings import SchedulerSettings

HIGH_WATER_MARK = 100_000


def _prepare(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.LINGER, 200)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)


def private_folder(chosen: Path | None) -> Path:
    """A folder that only this user enters, for the frontends' socket: the chosen one, or a fresh one.

    Raises ValueError when the chosen one is open to others, OSError when it cannot be made.
    """
    if chosen is None:
        return Path(tempfile.mkdtemp(prefix="gilir-"))
    chosen.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = chosen.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ValueError(f"run-dir {chosen} must belong to this user and be closed to others")
    return chosen


def frontend_socket(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    """Bind the socket of the frontends, or that of the admin process."""
    with set_up(context, zmq.ROUTER) as socket:
        _prepare(socket)
        socket.bind(address)
    return socket


def executor_socket(context: zmq.Context[zmq.Socket[bytes]], settings: SchedulerSettings) -> zmq.Socket[bytes]:
    """Bind the socket that executors dial. Raises zmq.ZMQError when the address is taken."""
    with set_up(context, zmq.ROUTER) as socket:
        _prepare(socket)
        give_up_the_dead(socket)
        socket.setsockopt(zmq.HANDSHAKE_IVL, int(settings.heartbeat_timeout_s * 1000))
        if settings.curve_secret_key is not None:
            public, secret = zmq.auth.load_certificate(settings.curve_secret_key)
            if secret is None:
                raise ValueError(f"{settings.curve_secret_key} holds no secret key")
            warn_if_exposed(settings.curve_secret_key)
            socket.curve_server, socket.curve_publickey, socket.curve_secretkey = True, public, secret
        if settings.executor_bind.startswith("ipc://"):
            Path(settings.executor_bind.removeprefix("ipc://")).parent.mkdir(parents=True, exist_ok=True)
        socket.bind(settings.executor_bind)
    return socket


def authenticator(context: zmq.Context[zmq.Socket[bytes]], settings: SchedulerSettings) -> ThreadAuthenticator | None:
    """Start checking executors' keys, where keys are in use: at each handshake, against the folder as it is then."""
    if settings.curve_client_keys is None:
        return None
    checker = ThreadAuthenticator(context)
    checker.configure_curve_callback(domain="*", credentials_provider=ExecutorKeys(settings.curve_client_keys))
    checker.start()
    return checker


def watch_disconnects(socket: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    """A socket that becomes readable when a peer's connection breaks."""
    return watch(socket, zmq.EVENT_DISCONNECTED)
