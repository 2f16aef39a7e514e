"""The executor's end of all hand-overs: a thread that serves other executors and reads from them.

The link's thread says what may be read and written, and sends the answers; iterations go on meanwhile.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import structlog
import zmq

from common.waker import Waker
from common.wire import Fetch, Fetched, Lend, Recall, TransferPoint, WireError
from common.wire.handover import MAX_CHUNK_BYTES, SECRET_BYTES
from executor_svc.handover.fetching import Fetching
from executor_svc.handover.lending import MAX_TICKETS, Lending, answer
from executor_svc.handover.store import BlockStore
from executor_svc.handover.transfer_socket import TransferSocket, place_of

MAX_AT_ONCE = 16
"""Requests served before the thread looks for other work."""


class Exchange:
    """Public methods are for the link's thread."""

    def __init__(self, transfer: TransferSocket, store: BlockStore) -> None:
        """Binds the socket. Raises zmq.ZMQError where that cannot be. A block has at most `MAX_CHUNK_BYTES`."""
        assert 0 < store.block_bytes <= MAX_CHUNK_BYTES
        self._transfer, self._store = transfer, store
        self.tell: Callable[[], None] = lambda: None
        """Called, from the thread, when there are answers."""
        self.num_junk = 0
        self._log: Any = structlog.get_logger()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._router = transfer.open(self._context)
        except BaseException:
            self._context.term()
            raise
        address = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self.point = TransferPoint(
            address=address,
            key=transfer.public_key,
            place=place_of(address),
            layout=store.layout,
            block_bytes=store.block_bytes,
        )
        self._lock = threading.Lock()
        """Held while a block is written: when `recall` or `forget` returns, nothing is written any more."""
        self._lending = Lending(store)
        self._queue: deque[Fetch] = deque()
        self._current: Fetch | None = None
        """Whose blocks may be written now."""
        self._answers: list[Fetched] = []
        self._closing = False
        self._waker = Waker()
        self._thread = threading.Thread(target=self._run, name="exchange", daemon=True)

    # --- the link's thread ---

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread and the socket."""
        self._closing = True
        self._waker.wake()
        if self._thread.ident is not None:
            self._thread.join()
        self._router.close(linger=0)
        self._context.term()
        self._waker.close()

    def take(self, order: Lend | Fetch | Recall) -> None:
        """An order of the core, of the present epoch."""
        with self._lock:
            match order:
                case Lend():
                    refusal = self._lending.lend(order)
                    if refusal:
                        self._log.warning("lends no blocks", ticket=order.ticket, reason=refusal)
                case Fetch():
                    refusal = self._refusal(order)
                    if refusal:
                        self._answers.append(_failed(order, refusal))
                    else:
                        self._queue.append(order)
                case Recall():
                    self._recall(order)
        self._waker.wake()

    def answers(self) -> list[Fetched]:
        """What the core must be told, since the last call."""
        with self._lock:
            answers, self._answers = self._answers, []
        return answers

    def forget(self) -> None:
        """The epoch is over: nothing may be read or written any more."""
        with self._lock:
            self._lending.clear()
            self._queue.clear()
            self._answers.clear()
            self._current = None
        self._waker.wake()

    def _refusal(self, order: Fetch) -> str:
        blocks = order.blocks.tolist()
        if len(order.secret) != SECRET_BYTES:
            return "a ticket without a secret"
        if not blocks or min(blocks) < 0 or max(blocks) >= self._store.num_blocks or len({*blocks}) < len(blocks):
            return "blocks out of range, or twice"
        return "too many at once" if len(self._queue) >= MAX_TICKETS else ""

    def _recall(self, order: Recall) -> None:
        if self._lending.recall(order.ticket):
            return
        if self._current is not None and self._current.ticket == order.ticket:
            self._answers.append(_failed(self._current, "recalled"))
            self._current = None
            return
        for waiting in self._queue:
            if waiting.ticket == order.ticket:
                self._queue.remove(waiting)
                self._answers.append(_failed(waiting, "recalled"))
                return

    # --- the thread ---

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._waker, zmq.POLLIN)
        fetching: Fetching | None = None
        while not self._closing:
            if fetching is None:
                fetching = self._begin_next()
                if fetching is not None:
                    poller.register(fetching.socket, zmq.POLLIN)
            if fetching is not None:
                fetching.advance(partial(self._write, fetching.order), _now())
                if fetching.outcome is not None or self._current is not fetching.order:
                    poller.unregister(fetching.socket)
                    self._end(fetching)
                    fetching = None
                    continue
            patience = None if fetching is None else max(0, int((fetching.due - _now()) * 1000) + 1)
            ready = dict(poller.poll(patience))
            self._waker.clear()
            if self._router in ready:
                self._serve()
        if fetching is not None:
            fetching.close()

    def _begin_next(self) -> Fetching | None:
        """The next one whose source can be dialled; None when there is none."""
        while True:
            with self._lock:
                if not self._queue:
                    return None
                order = self._current = self._queue.popleft()
            try:
                return Fetching(order, self._store.block_bytes, self._transfer, self._context, _now())
            except (zmq.ZMQError, ValueError) as error:
                self._answer(order, f"cannot dial the source: {error}", 0.0)

    def _write(self, order: Fetch, blocks: list[int], data: bytes) -> str:
        """Returns why not, or nothing."""
        with self._lock:
            if self._current is not order:
                return "recalled"
            try:
                self._store.write(blocks, data)
            except (RuntimeError, MemoryError) as error:
                return f"cannot write: {error}"
        return ""

    def _end(self, fetching: Fetching) -> None:
        fetching.close()
        self._answer(fetching.order, fetching.outcome or "", _now() - fetching.begun)

    def _answer(self, order: Fetch, reason: str, seconds: float) -> None:
        with self._lock:
            if self._current is not order:
                return  # it was recalled, which is answered, or forgotten
            self._current = None
            busy_us = min(0xFFFF_FFFF, int(seconds * 1e6))
            self._answers.append(Fetched(order.epoch, order.ticket, not reason, reason[:256], busy_us))
        self.tell()

    def _serve(self) -> None:
        """Answer some requests. One for what is not lent, or not yet, is passed over: who may read asks again."""
        for _ in range(MAX_AT_ONCE):
            try:
                parts = self._router.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            try:
                if len(parts) != 2:
                    raise WireError(f"a message of {len(parts)} frames")
                with self._lock:
                    found = self._lending.find(parts[1])
            except WireError as error:
                self._drop(str(error))
                continue
            if found is None:
                continue
            wanted, blocks = found
            try:
                data = self._store.read(blocks)
            except (RuntimeError, MemoryError) as error:
                self._log.warning("cannot read KV blocks", error=str(error)[:1000])
                continue
            with contextlib.suppress(zmq.ZMQError):  # the peer has gone, or reads too slowly
                self._router.send_multipart([parts[0], answer(wanted, data)], zmq.DONTWAIT)

    def _drop(self, why: str) -> None:
        """Junk is counted, and logged at the 1st, 2nd, 4th, 8th … time."""
        self.num_junk += 1
        if self.num_junk & (self.num_junk - 1) == 0:
            self._log.warning("junk on the transfer socket dropped", count=self.num_junk, error=why)


def _failed(order: Fetch, reason: str) -> Fetched:
    return Fetched(order.epoch, order.ticket, False, reason)


def _now() -> float:
    return time.monotonic()
