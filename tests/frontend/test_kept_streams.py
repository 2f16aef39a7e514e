"""What is kept of streams for those who resume them: how long, and in how much memory."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from scheduler_svc.frontend.resuming.keeper import Keeper
from scheduler_svc.frontend.resuming.kept_stream import EVENT_BYTES, STREAM_BYTES, KeptStream
from scheduler_svc.frontend.shapes import CompletionShape
from scheduler_svc.frontend.sse import DONE, ChunkWriter
from scheduler_svc.frontend.streams import Generation, Stream
from scheduler_svc.http.errors import ApiError, ClientGone

LONG = 1 << 30


class Kept:
    """A keeper, and which of its streams it has cancelled."""

    def __init__(self, hold_s: float = 60.0, max_bytes: int = LONG, max_stream_bytes: int = LONG) -> None:
        self.keeper = Keeper(hold_s, max_bytes, max_stream_bytes)
        self.cancelled: list[str] = []

    def add(self, name: str) -> KeptStream:
        return self.keeper.add(("tenant", name), lambda: self._note(name))

    def _note(self, name: str) -> None:
        self.cancelled += [name] if name not in self.cancelled else []

    def find(self, name: str, owner: str = "tenant") -> KeptStream | None:
        return self.keeper.find(owner, ["no such", name])

    def check(self) -> None:
        """The sum is that of the streams."""
        streams = list(self.keeper._streams)
        assert self.keeper.num_bytes == sum(stream.size for stream in streams)
        for stream in streams:
            size = sum(len(event) + EVENT_BYTES for event in stream._events)
            assert stream.size == STREAM_BYTES + size
            assert (stream in self.keeper._unread) != stream.is_read


def event(number: int, size: int = 0) -> bytes:
    return b"data: %d%s\n\n" % (number, b"x" * size)


def numbered(first: int, last: int, size: int = 0) -> bytes:
    return b"".join(b"id: %d\n%s" % (number, event(number, size)) for number in range(first, last + 1))


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(test())  # type: ignore[arg-type]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


def error_of(stream: KeptStream, after: int) -> ApiError:
    with pytest.raises(ApiError) as caught:
        stream.open(after)
    return caught.value


def test_a_stream_is_kept_for_a_time_after_its_reader_and_after_its_end() -> None:
    async def test() -> None:
        kept = Kept(hold_s=0.02)
        read, left, ended = (kept.add(name) for name in ("read", "left", "ended"))
        readings = {stream: stream.open(0) for stream in (read, left, ended)}
        readings[ended].leave()
        readings[left].leave()
        timer = kept.keeper._unread[ended]
        ended.end()
        assert timer.cancelled(), "its time begins anew"
        kept.check()
        await until(lambda: len(kept.keeper) == 1)
        assert kept.find("read") is read and sorted(kept.cancelled) == ["ended", "left"]
        assert kept.find("left") is None
        readings[read].leave()
        kept.check()
        await until(lambda: len(kept.keeper) == 0)
        assert kept.keeper.num_bytes == 0
        # Who has found it before, and asks after an event only now, does not wait for ever.
        assert error_of(read, 0).status == 410

    run(test)


def test_who_comes_in_time_finds_it_as_long_as_he_stays() -> None:
    async def test() -> None:
        kept = Kept(hold_s=0.02)
        stream, other = kept.add("a"), kept.add("b")
        stream.open(0).leave()
        reading = stream.open(0)
        other.open(0).leave()
        await until(lambda: kept.find("b") is None)  # which was left later
        stream.append(event(1), LONG)
        assert await reading.read() == (numbered(1, 1), True)
        assert kept.find("a") is stream and kept.find("a", "another") is None

    run(test)


def test_what_was_sent_gives_way_first_and_is_told_to_be_gone() -> None:
    async def test() -> None:
        kept, limit = Kept(), STREAM_BYTES + 10 * (EVENT_BYTES + 120)
        stream = kept.add("a")
        reading = stream.open(0)
        for number in range(1, 51):
            assert stream.append(event(number, 100), limit)
            assert await reading.read() == (numbered(number, number, 100), True)
        assert stream.first > 30 and stream.size <= limit
        gone = error_of(stream, stream.first - 2)
        assert (gone.status, gone.code) == (410, "events_gone") and error_of(stream, 51).status == 400
        first = stream.first
        again = stream.open(first - 1)
        assert await again.read() == (numbered(first, 50, 100), True)
        assert not stream.append(event(51, 100), limit), "what is being sent has not been sent"
        kept.check()

    run(test)


@pytest.mark.parametrize("connected", [True, False])
def test_what_was_not_sent_does_not_give_way_but_ends_the_stream(connected: bool) -> None:
    async def test() -> None:
        kept = Kept(max_stream_bytes=STREAM_BYTES + 5 * (EVENT_BYTES + 120))
        stream, broken = kept.add("a"), []
        reading = stream.open(0)
        reading.cut_off = lambda: broken.append("a")
        if not connected:
            reading.leave()
        assert kept.keeper._append(stream, b"".join(event(number, 90) for number in range(1, 6)))
        assert not kept.keeper._append(stream, event(6, 90))
        assert kept.cancelled == ["a"] and broken == (["a"] if connected else [])
        with pytest.raises(ClientGone):
            await reading.read()
        assert error_of(stream, 0).status == 410 and kept.find("a") is stream
        kept.check()

    run(test)


def test_the_sum_is_bounded_and_who_is_without_a_reader_goes_first() -> None:
    async def test() -> None:
        kept = Kept(max_bytes=20_000)
        streams = {name: kept.add(name) for name in ("late", "early", "quiet", "busy")}
        readings = {name: stream.open(0) for name, stream in streams.items()}
        for stream in streams.values():
            stream.append(event(1, 2000), LONG)
        readings["early"].leave()
        readings["late"].leave()
        seen: list[list[str]] = []
        for number in range(2, 60):
            streams["busy"].append(event(number, 500), LONG)
            assert (await readings["busy"].read())[0].endswith(numbered(number, number, 500))
            kept.check()
            assert kept.keeper.num_bytes <= 20_000
            if kept.cancelled not in seen:
                seen.append(kept.cancelled[:])
                for name in kept.cancelled[-1:]:
                    assert error_of(streams[name], 0).status == 410 and kept.find(name) is streams[name]
        assert seen == [[], ["early"], ["early", "late"]]
        assert streams["busy"].first > 1 and streams["quiet"].first == 1
        assert kept.find("early") is None
        streams["quiet"].append(event(2, 20_000), LONG)
        assert kept.cancelled[2:] == ["quiet"] and kept.keeper.num_bytes <= 20_000
        kept.check()

    run(test)


def test_a_newer_request_goes_before_an_older_one_of_its_name() -> None:
    async def test() -> None:
        kept = Kept()
        left, read = kept.add("a"), kept.add("b")
        left.open(0).leave()
        reading = read.open(0)
        newer = kept.add("a"), kept.add("b")
        assert kept.cancelled == ["a"] and (kept.find("a"), kept.find("b")) == newer
        read.append(event(1), LONG)
        assert await reading.read() == (numbered(1, 1), True)
        reading.leave()
        assert kept.cancelled == ["a", "b"] and kept.find("b") is newer[1]

    run(test)


class Said:
    """A call that says what a test tells it, and is kept."""

    def __init__(self, kept: Kept) -> None:
        self.generation, self.closed = (
            Generation(lambda numbers, *, stopped=False: None, lambda _generation: self._note()),
            0,
        )
        self._stream = Stream(self.generation, 1, 0, False, None)
        self._items: list[bytes | Exception] = []
        self.done = False
        writer = ChunkWriter("id", 1, "m", CompletionShape(None), False)  # type: ignore[arg-type]
        self.reading = kept.keeper.keep(("tenant", "a"), self, writer)  # type: ignore[arg-type]

    def _note(self) -> None:
        self.closed += 1

    def say(self, *items: bytes | Exception) -> None:
        self._items += items
        self._stream.tell()

    async def chunks(self, _writer: ChunkWriter) -> bytes:
        while not self._items:
            await self.generation.wait()
        item = self._items.pop(0)
        if isinstance(item, Exception):
            raise item
        self.done = item.endswith(DONE)
        return item

    def summary(self) -> dict[str, Any]:
        return {}


def test_a_call_is_written_to_its_end_though_nobody_reads() -> None:
    async def test() -> None:
        kept = Kept()
        call = Said(kept)
        call.reading.leave()
        call.say(event(1), event(2) + event(3), DONE)
        await until(lambda: call.closed > 0)
        stream = kept.find("a")
        assert stream is not None and not call.generation.gone
        assert await stream.open(1).read() == (numbered(2, 3) + b"id: 4\n" + DONE, False)
        assert not await stream.open(4).begin()

    run(test)


def test_a_call_that_nobody_comes_back_to_is_cancelled() -> None:
    async def test() -> None:
        kept = Kept(hold_s=0.02)
        call = Said(kept)
        call.say(event(1))
        assert await call.reading.read() == (numbered(1, 1), True)
        call.reading.leave()
        await until(lambda: call.closed > 1)  # once when it is left, once when its writing ends
        assert call.generation.gone and kept.find("a") is None and kept.keeper.num_bytes == 0

    run(test)


@pytest.mark.parametrize("error", [ApiError(429, "full", code="queue_full"), ValueError("a mistake")])
@pytest.mark.parametrize("begun", [True, False])
def test_a_call_that_goes_wrong_says_so_to_whoever_asks(error: Exception, begun: bool) -> None:
    async def test() -> None:
        kept = Kept()
        call = Said(kept)
        status = error.status if isinstance(error, ApiError) else 500
        call.say(*([event(1)] if begun else []), error)
        await until(lambda: call.closed > 0)
        stream = kept.find("a")
        assert stream is not None
        if begun:
            body, more = await stream.open(0).read()
            assert body.startswith(numbered(1, 1) + b'id: 2\ndata: {"error"') and not more
            assert body.endswith(b"id: 3\n" + DONE) and (b"queue_full" in body) == (status == 429)
        else:
            assert error_of(stream, 0).status == status
            with pytest.raises(ApiError):
                await call.reading.begin()

    run(test)


def test_random_walks_lose_no_event_and_keep_the_books() -> None:
    async def walk(dice: random.Random) -> None:
        kept = Kept(max_bytes=dice.choice([4000, 20_000, LONG]))
        limit = dice.choice([2000, 8000, LONG])
        streams: dict[str, tuple[KeptStream, list[int]]] = {}
        readings: dict[KeptStream, Any] = {}
        for step in range(150):
            name = dice.choice("abc")
            stream, read = streams.get(name, (None, []))
            if stream is None or stream.failure is not None or dice.random() < 0.02:
                streams[name] = kept.add(name), []
                continue
            match dice.choice(["append", "append", "append", "read", "open", "leave", "end"]):
                case "append" if not stream.ended:
                    body = b"".join(event(step, dice.randrange(200)) for _ in range(dice.randrange(1, 4)))
                    if not stream.append(body, limit):
                        stream.give_up(ApiError(410, "too long"))
                case "open" if len(read) + 1 >= stream.first:
                    after = max(len(read) - dice.randrange(4), stream.first - 1)  # some may not have arrived
                    del read[after:]
                    readings[stream] = stream.open(after)
                case "read" if stream.is_read and (stream.last > len(read) or stream.ended):
                    body, more = await readings[stream].read()
                    numbers = [int(part[4:].split(b"\n")[0]) for part in body.split(b"\n\n")[:-1]]
                    assert numbers == list(range(len(read) + 1, stream.last + 1)) and more != stream.ended
                    read += numbers
                case "leave" if stream.is_read:
                    readings[stream].leave()
                case "end" if dice.random() < 0.2 and not stream.ended:
                    stream.end()
            kept.check()
        kept.keeper.close()

    async def test() -> None:
        for seed in range(40):
            await walk(random.Random(seed))

    run(test)
