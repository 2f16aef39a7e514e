"""The core's end of the conversation with the admin process: it answers what has come, a little at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import structlog
import zmq

from common.logs import Seldom
from common.wire import AdminAlive, Command, Message, Survey, WireError, decode, encode
from scheduler_svc.admin.roster import roster
from scheduler_svc.admin.steering import obey
from scheduler_svc.core import Scheduler
from scheduler_svc.membership import Membership

log = structlog.get_logger()

MAX_ANSWERS = 16
"""Questions that one turn of the loop answers; the others wait for the next."""


class AdminDesk:
    """Reads a ROUTER socket that only the admin process is to dial. Junk is logged and dropped."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        scheduler: Scheduler,
        membership: Membership,
        heard: Callable[[float], None],
    ) -> None:
        """`heard` is told when the admin process has shown life."""
        self.socket = socket
        self._scheduler, self._membership, self._heard = scheduler, membership, heard
        self._junk_seen = Seldom()

    def serve(self, now: float) -> None:
        """Answer what has come."""
        for _ in range(MAX_ANSWERS):
            try:
                parts = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                question = decode(parts[1]) if len(parts) == 2 else None
            except WireError as error:
                if self._junk_seen.happens():
                    log.warning("junk on the admin socket dropped", error=str(error), count=self._junk_seen.count)
                continue
            answer = self._answer(question, now)
            if answer is not None:
                # One that has gone meanwhile, or reads nothing, needs no answer.
                with contextlib.suppress(zmq.ZMQError):
                    self.socket.send_multipart([parts[0], encode(answer)], zmq.NOBLOCK)

    def _answer(self, question: Message | None, now: float) -> Message | None:
        match question:
            case AdminAlive():
                self._heard(now)
                return None
            case Survey():
                return roster(question.number, self._scheduler, self._membership, now)
            case Command():
                return obey(question, self._scheduler, self._membership, now)
        if self._junk_seen.happens():
            log.warning("unexpected message on the admin socket dropped", kind=type(question).__name__)
        return None
