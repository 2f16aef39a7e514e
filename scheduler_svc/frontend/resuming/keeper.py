"""The streams that a frontend keeps: by whose they are and their requests' ids, within bounds of time and memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import structlog

from scheduler_svc.frontend.call import Call
from scheduler_svc.frontend.event_stream import next_events
from scheduler_svc.frontend.resuming.kept_stream import STREAM_BYTES, KeptStream, LocalReading, not_kept
from scheduler_svc.frontend.sse import ChunkWriter
from scheduler_svc.http.errors import ApiError, ClientGone, internal

log = structlog.get_logger()

MAX_STREAM_BYTES = 16 << 20
"""Of one stream's events."""
TOO_LONG = "The stream was cancelled: more of it was unread than is kept."
NO_ROOM = "The stream is kept no more: the memory for such streams was needed for others."

Name = tuple[str, str]
"""Whose it is, and the request's id."""


class Keeper:
    """Writes what it is given to keep as it comes. What nobody reads is cancelled or forgotten after `hold_s`.

    A request goes before an older one of its name.
    """

    def __init__(self, hold_s: float, max_bytes: int, max_stream_bytes: int = MAX_STREAM_BYTES) -> None:
        """`max_bytes`: of all streams' events; those that have been without a reader for longest go first."""
        self._hold_s, self._max_bytes, self._max_stream_bytes = hold_s, max_bytes, max_stream_bytes
        self.num_bytes = 0
        self._streams: dict[KeptStream, Name] = {}
        self._by_name: dict[Name, KeptStream] = {}
        self._unread: dict[KeptStream, asyncio.TimerHandle] = {}
        """Without a reader, in the order in which it left or they ended."""
        self._writers: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def is_on(self) -> bool:
        return self._hold_s > 0

    def close(self) -> None:
        """Write and hold nothing more."""
        for writer in self._writers:
            writer.cancel()
        for timer in self._unread.values():
            timer.cancel()

    # --- streams ---

    def keep(self, name: Name, call: Call, writer: ChunkWriter) -> LocalReading:
        """Write a call's events from now on, whether or not somebody reads them. Returns the first reading of them.

        The call's generation is closed in the end.
        """
        stream = self.add(name, call.generation.leave)
        reading = stream.open(0)
        task = asyncio.get_running_loop().create_task(self._write(stream, call, writer))
        self._writers.add(task)
        task.add_done_callback(self._writers.discard)
        return reading

    def add(self, name: Name, cancel: Callable[[], None]) -> KeptStream:
        """A stream that nobody writes or reads yet."""
        older = self._by_name.get(name)
        stream = KeptStream(cancel, self._count, self._turn)
        self._streams[stream] = name
        self._by_name[name] = stream
        self.num_bytes += stream.size
        self._turn(stream)
        if older is not None and not older.is_read:
            self._forget(older)
        return stream

    def find(self, owner: str, ids: Iterable[str]) -> KeptStream | None:
        """The stream of the first of these ids that has one."""
        found = (self._by_name.get((owner, request_id)) for request_id in ids)
        return next((stream for stream in found if stream is not None), None)

    async def _write(self, stream: KeptStream, call: Call, writer: ChunkWriter) -> None:
        try:
            body, more = await call.chunks(writer), not call.done
            while self._append(stream, body) and more:
                body, more = await next_events(call, writer)
            if not stream.ended:
                stream.end()
        except ClientGone:
            pass
        except ApiError as error:
            stream.fail(error)
        except Exception:
            log.exception("stream failed")
            stream.fail(internal())
        finally:
            call.generation.close()
            if not stream.is_read:
                log.info("a stream ended without a reader", **call.summary())

    def _append(self, stream: KeptStream, body: bytes) -> bool:
        """Returns whether the stream is still kept."""
        if not stream.append(body, self._max_stream_bytes):
            log.warning("a reader fell too far behind: its stream is cancelled", kept_bytes=stream.size)
            stream.give_up(not_kept(TOO_LONG))
        return stream.failure is None

    # --- bounds ---

    def _count(self, stream: KeptStream, num_bytes: int) -> None:
        if stream in self._streams:
            self.num_bytes += num_bytes
            if num_bytes > 0:
                self._make_room()

    def _turn(self, stream: KeptStream) -> None:
        """It has a reader now, or none, or has ended: then the time that it is held begins anew."""
        if stream not in self._streams:
            return
        if stream.is_read:
            self._release(stream)
        elif self._by_name.get(self._streams[stream]) is stream:
            self._release(stream)
            loop = asyncio.get_running_loop()
            self._unread[stream] = loop.call_later(self._hold_s, self._forget, stream)
        else:  # a newer one has its name
            self._forget(stream)

    def _release(self, stream: KeptStream) -> None:
        timer = self._unread.pop(stream, None)
        if timer is not None:
            timer.cancel()

    def _forget(self, stream: KeptStream) -> None:
        self._release(stream)
        name = self._streams.pop(stream)
        if self._by_name.get(name) is stream:
            del self._by_name[name]
        self.num_bytes -= stream.size
        stream.drop()

    def _make_room(self) -> None:
        """Streams without a reader go first; then what was sent of those that have most."""
        while self.num_bytes > self._max_bytes:
            stream = next(iter(self._unread), None)
            if stream is not None:
                if stream.size > STREAM_BYTES:
                    stream.give_up(not_kept(NO_ROOM))
                else:
                    self._forget(stream)
                continue
            stream = max(self._streams, key=lambda one: one.size)
            if stream.size == STREAM_BYTES:
                return
            if not stream.forget_sent():
                stream.give_up(not_kept(NO_ROOM))
