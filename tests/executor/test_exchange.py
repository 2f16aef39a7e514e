"""Blocks go from one executor to another: what is lent, nothing else, and nothing after a recall."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import zmq

from common.wire import BlocksRead, Fetch, Fetched, Lend, ReadBlocks, Recall, encode
from executor_svc.handover import Exchange, TransferSocket, fetching, lending, transfer_socket
from executor_svc.handover.transfer_socket import place_of
from tests.executor.plans import ids

SECRET = b"0123456789abcdef"
EMPTY = 0xEE


class Blocks:
    """Block `i` of a source is full of `i`; of a target, empty."""

    def __init__(self, num_blocks: int = 40, block_bytes: int = 64, *, full: bool = True) -> None:
        self.num_blocks, self.block_bytes, self.layout = num_blocks, block_bytes, b"l"
        self.content = [bytes([i if full else EMPTY]) * block_bytes for i in range(num_blocks)]
        self.written: list[int] = []
        self.gate = threading.Event()
        """Writing waits for it."""
        self.gate.set()
        self.more = threading.Event()
        """All reading but the first waits for it."""
        self.more.set()
        self.num_reads = 0

    def read(self, blocks: list[int]) -> bytes:
        if self.num_reads:
            self.more.wait(60)
        self.num_reads += 1
        return b"".join(self.content[block] for block in blocks)

    def write(self, blocks: list[int], data: bytes) -> None:
        self.gate.wait(60)
        for place, block in enumerate(blocks):
            self.content[block] = data[place * self.block_bytes : (place + 1) * self.block_bytes]
            self.written.append(block)


@dataclass
class End:
    """An exchange with its blocks."""

    exchange: Exchange
    blocks: Blocks

    def answer(self, timeout_s: float = 60.0) -> Fetched:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            answers = self.exchange.answers()
            if answers:
                (answer,) = answers
                return answer
            time.sleep(0.005)
        raise TimeoutError("no answer")

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, "it did not come true"
            time.sleep(0.005)


@contextmanager
def end(*, full: bool, bind: str = "tcp://127.0.0.1:*", key: bytes = b"", **sizes: int) -> Iterator[End]:
    blocks = Blocks(full=full, **sizes)
    made = End(Exchange(TransferSocket(bind, key), blocks), blocks)
    made.exchange.start()
    try:
        yield made
    finally:
        blocks.gate.set()
        blocks.more.set()
        made.exchange.close()


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four blocks of 64 bytes."""
    for module in (fetching, lending, transfer_socket):
        monkeypatch.setattr(module, "CHUNK_BYTES", 256)


@pytest.fixture
def source() -> Iterator[End]:
    with end(full=True) as made:
        yield made


@pytest.fixture
def target() -> Iterator[End]:
    with end(full=False) as made:
        yield made


def lend(*blocks: int, secret: bytes = SECRET, ticket: int = 1) -> Lend:
    return Lend(1, ticket, secret, ids(*blocks))


def fetch(source: End, *blocks: int, **changes: Any) -> Fetch:
    point = source.exchange.point
    return replace(Fetch(2, 1, SECRET, point.address, point.key, ids(*blocks), 5000), **changes)


def test_blocks_come_to_the_places_that_were_named(source: End, target: End) -> None:
    lent, places = list(range(39, 4, -3)), list(range(2, 26, 2))
    source.exchange.take(lend(*lent))
    target.exchange.take(fetch(source, *places))
    answer = target.answer()
    assert (answer.epoch, answer.ticket, answer.done, answer.reason) == (2, 1, True, "") and answer.busy_us > 0
    assert sorted(target.blocks.written) == sorted(places)
    for number, content in enumerate(target.blocks.content):
        value = lent[places.index(number)] if number in places else EMPTY
        assert content == bytes([value]) * 64


def test_the_target_may_hear_of_it_first(source: End, target: End) -> None:
    target.exchange.take(fetch(source, 5, 6))
    time.sleep(0.15)
    assert not target.exchange.answers()
    source.exchange.take(lend(7, 8))
    assert target.answer().done and target.blocks.content[6] == bytes([8]) * 64


def test_one_after_the_other(source: End, target: End) -> None:
    secrets = [bytes([i]) * 16 for i in range(5)]
    for i, secret in enumerate(secrets):
        source.exchange.take(lend(i, secret=secret, ticket=i))
        target.exchange.take(fetch(source, 10 + i, secret=secret, ticket=i))
    found: list[Fetched] = []
    target.until(lambda: found.extend(target.exchange.answers()) or len(found) == 5)
    assert [answer.ticket for answer in found] == list(range(5)) and all(answer.done for answer in found)
    assert [target.blocks.content[10 + i][0] for i in range(5)] == list(range(5))


def test_both_ways_at_once(source: End, target: End) -> None:
    source.exchange.take(lend(*range(20)))
    target.exchange.take(lend(*range(20)))
    target.exchange.take(fetch(source, *range(20, 40)))
    source.exchange.take(fetch(target, *range(20, 40)))
    assert target.answer().done and source.answer().done
    assert source.blocks.content[30] == bytes([EMPTY]) * 64 and target.blocks.content[30] == bytes([10]) * 64


@pytest.mark.parametrize("why", ["unknown", "recalled", "forgotten", "beyond"])
def test_what_is_not_lent_is_not_read(source: End, target: End, why: str) -> None:
    source.exchange.take(lend(7, 8))
    if why == "recalled":
        source.exchange.take(Recall(1, 1))
    elif why == "forgotten":
        source.exchange.forget()
    secret = b"x" * 16 if why == "unknown" else SECRET
    target.exchange.take(fetch(source, *range(6 if why == "beyond" else 2), secret=secret, timeout_ms=200))
    answer = target.answer()
    assert not answer.done and answer.reason == "it took too long" and not target.blocks.written


@pytest.mark.parametrize("how", ["recall", "forget"])
def test_nothing_is_written_after_a_recall(source: End, target: End, how: str) -> None:
    source.exchange.take(lend(*range(40)))
    source.blocks.more.clear()
    target.blocks.gate.clear()
    target.exchange.take(fetch(source, *range(40)))
    target.until(lambda: target.exchange._lock.locked())
    threading.Timer(0.05, target.blocks.gate.set).start()
    if how == "recall":
        target.exchange.take(Recall(2, 1))
        assert target.answer() == Fetched(2, 1, False, "recalled")
    else:
        target.exchange.forget()
    count = len(target.blocks.written)
    source.blocks.more.set()
    time.sleep(0.1)
    assert len(target.blocks.written) == count < 40 and not target.exchange.answers()
    target.exchange.take(fetch(source, 3, ticket=2, secret=SECRET, timeout_ms=100))
    assert target.answer().ticket == 2, "the next one begins"


def test_one_that_waits_can_be_recalled(source: End, target: End) -> None:
    target.exchange.take(fetch(source, 1, ticket=1))
    target.exchange.take(fetch(source, 2, ticket=2))
    target.exchange.take(Recall(2, 2))
    target.exchange.take(Recall(2, 77))
    assert target.answer() == Fetched(2, 2, False, "recalled")


def test_a_dead_source_is_given_up(monkeypatch: pytest.MonkeyPatch, target: End) -> None:
    monkeypatch.setattr(fetching, "SILENCE_MS", 200)
    with end(full=True) as source:
        order = fetch(source, 1, 2)
    began = time.monotonic()
    target.exchange.take(order)
    assert target.answer().reason == "the source is silent" and time.monotonic() - began < 2


def test_an_address_that_cannot_be_dialled(source: End, target: End) -> None:
    for change in ({"address": "nonsense"}, {"key": b"short"}):
        target.exchange.take(fetch(source, 1, **change))
        assert target.answer().reason.startswith("cannot dial")


def test_one_that_cannot_be_dialled_holds_up_no_other(source: End, target: End) -> None:
    source.exchange.take(lend(7))
    source.exchange.take(lend(8, secret=SECRET[::-1], ticket=3))
    target.blocks.gate.clear()
    target.exchange.take(fetch(source, 1))
    target.exchange.take(fetch(source, 2, ticket=2, address="nonsense"))
    target.exchange.take(fetch(source, 3, ticket=3, secret=SECRET[::-1]))
    target.blocks.gate.set()
    target.until(lambda: target.blocks.written == [1, 3])
    target.until(lambda: len(target.exchange._answers) == 3)
    assert [answer.done for answer in target.exchange.answers()] == [True, False, True]


@pytest.mark.parametrize("blocks", [(), (-1,), (40,), (3, 3)])
def test_orders_that_name_wrong_blocks_touch_nothing(source: End, target: End, blocks: tuple[int, ...]) -> None:
    target.exchange.take(fetch(source, *blocks))
    assert target.answer().reason == "blocks out of range, or twice"
    if blocks != (3, 3):
        source.exchange.take(lend(*blocks))
        assert not len(source.exchange._lending)


def test_a_source_with_blocks_of_another_size(source: End) -> None:
    with end(full=False, block_bytes=32) as small:
        source.exchange.take(lend(1))
        small.exchange.take(fetch(source, 1))
        assert small.answer().reason == "the source has blocks of another size"


def test_junk_is_dropped_and_counted(source: End, target: End) -> None:
    source.exchange.take(lend(7))
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.connect(source.exchange.point.address)
        junk = [
            b"",
            b"\xc1",
            encode(Recall(1, 1)),
            encode(BlocksRead(SECRET, 0, b"x")),
            encode(ReadBlocks(SECRET, 0, 9)),
        ]
        for data in junk:
            stranger.send(data)
        stranger.send_multipart([b"a", b"b"])
        stranger.send(encode(ReadBlocks(b"short", 0, 1)))
        source.until(lambda: source.exchange.num_junk == len(junk) + 1)
        stranger.send(b"\0" * 100_000)
        target.exchange.take(fetch(source, 3))
        assert target.answer().done
        assert not stranger.poll(0), "nothing was told to the stranger"


def test_junk_from_the_source_is_dropped(target: End) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as liar:
        liar.linger = 0
        port = liar.bind_to_random_port("tcp://127.0.0.1")
        target.exchange.take(Fetch(2, 1, SECRET, f"tcp://127.0.0.1:{port}", b"", ids(5), 5000))
        peer, _ = liar.recv_multipart()
        good = encode(BlocksRead(SECRET, 0, b"g" * 64))
        for frames in ([b"\xc1"], [good, good], [encode(BlocksRead(b"x" * 16, 0, b"b" * 64))],
                       [encode(BlocksRead(SECRET, 4, b"b" * 64))], [good]):  # fmt: skip
            liar.send_multipart([peer, *frames])
        assert target.answer().done and target.blocks.written == [5] and target.blocks.content[5] == b"g" * 64


def test_with_keys_nothing_is_told_without(target: End) -> None:
    public, secret = zmq.curve_keypair()
    with end(full=True, key=secret) as source:
        assert source.exchange.point.key == public
        source.exchange.take(lend(7))
        target.exchange.take(fetch(source, 3))
        assert target.answer().done
        target.exchange.take(fetch(source, 4, key=b"", timeout_ms=200))
        assert not target.answer().done and target.blocks.written == [3]


def test_places(source: End, target: End) -> None:
    """Executors of one machine reach each other's loopback; an address of the network is reached from everywhere."""
    assert source.exchange.point.place == target.exchange.point.place == place_of("tcp://127.0.0.1:1") != b""
    assert place_of("tcp://10.1.2.3:5") == b""
    assert len({place_of("ipc:///tmp/x"), place_of("tcp://localhost:1")}) == 2


def test_those_who_see_the_same_folder_reach_each_other(tmp_path: Path) -> None:
    """As containers with a volume in common do."""
    shared, other = tmp_path / "shared", tmp_path / "other"
    shared.mkdir(), other.mkdir()
    one = place_of(f"ipc://{shared}/a.sock")
    assert one == place_of(f"ipc://{shared}/b.sock") != place_of(f"ipc://{other}/a.sock")
    shared.rename(tmp_path / "away")
    other.rename(shared)
    assert place_of(f"ipc://{shared}/a.sock") != one, "another folder at the same path"


def test_a_bound_address_is_an_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(zmq.ZMQError):
            Exchange(TransferSocket(f"tcp://127.0.0.1:{taken.getsockname()[1]}"), Blocks())


def test_a_store_that_fails_fails_the_hand_over(source: End, target: End, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> bytes:
        raise RuntimeError("the device is gone")

    source.exchange.take(lend(7))
    monkeypatch.setattr(target.blocks, "write", broken)
    target.exchange.take(fetch(source, 3))
    assert target.answer().reason == "cannot write: the device is gone"
    monkeypatch.setattr(source.blocks, "read", broken)
    target.exchange.take(fetch(source, 3, timeout_ms=200))
    assert target.answer().reason == "it took too long"


def test_the_thread_ends_in_the_middle_of_a_fetch(source: End) -> None:
    with end(full=False) as target:
        target.exchange.take(fetch(source, 3))
        target.until(lambda: target.exchange._current is not None)
    assert not target.exchange._thread.is_alive()
