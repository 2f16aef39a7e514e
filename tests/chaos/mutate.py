"""Junk made of real messages: bytes and fields changed, dropped, doubled and mixed, by a seed."""

from __future__ import annotations

import random
from typing import Any

import msgpack

from common.wire import Message, encode

EXTREMES: tuple[Any, ...] = (
    0, 1, -1, 7, 255, 65535, 65536, 2**31 - 1, 2**31, 2**32, 2**63, 2**64 - 1, -(2**63), None, True, 0.0, -1.5, 1e300,
    float("nan"), float("inf"), "", "x" * 300, "\0", b"", b"\0" * 4, b"\xff" * 8, b"\1\0\0\0\2\0\0\0", [], [[]], {},
    {"k": 1}, {1: 2},
)  # fmt: skip
BYTES = (
    b"", b"\x45", b"\xc1", b"\x92\x01", b"\x93junk", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\x91" * 200,
    b"\xc6\xff\xff\xff\xff", b"\x81\xa1a\x01", b"\x94\x02\x01", b"\xd4\x01\x00",
)  # fmt: skip


class Mutator:
    """Makes one junk message after the other from a corpus of real ones."""

    def __init__(self, seed: int, corpus: list[Message], *, bytes_share: float = 0.5) -> None:
        """`bytes_share`: how much of it has bytes changed, whatever they mean; the rest has fields changed."""
        self._draw, self._bytes_share = random.Random(seed), bytes_share
        self._corpus = [encode(item) for item in corpus]

    def frames(self) -> list[bytes]:
        """The frames of one message: nearly always one."""
        count = self._draw.choice((0, 2, 3)) if self._draw.random() < 0.03 else 1
        return [self.junk() for _ in range(count)] or [b"", b""]

    def junk(self) -> bytes:
        kind = self._draw.random()
        if kind < self._bytes_share / 10:
            return self._draw.choice(BYTES)
        data = self._draw.choice(self._corpus)
        if kind < self._bytes_share:
            return self._with_other_bytes(data)
        for _ in range(self._draw.choice((1, 1, 1, 2, 5))):
            data = self._with_other_fields(data)
        return data

    def _with_other_bytes(self, data: bytes) -> bytes:
        draw, out = self._draw, bytearray(data)
        for _ in range(draw.choice((1, 1, 2, 8))):
            place = draw.randrange(len(out)) if out else 0
            match draw.randrange(5):
                case 0 if out:
                    out[place] ^= 1 << draw.randrange(8)
                case 1 if out:
                    out[place] = draw.choice((0, 0x7F, 0x80, 0xC0, 0xC1, 0xFF))
                case 2:
                    del out[place:]
                case 3:
                    out[place:place] = draw.randbytes(draw.randint(1, 9))
                case _:
                    out[place:] = draw.choice(self._corpus)[place:]
        return bytes(out)

    def _alike(self, value: Any) -> Any:
        """Another value of the same type, so that it is not the type that gives the junk away."""
        draw = self._draw
        if isinstance(value, bytes) and value:
            place = draw.randrange(len(value))
            number = draw.choice((0, 1, 2, 7, 255, 65535, 2**31 - 1, 2**32 - 1)).to_bytes(4, "little")
            kind = draw.randrange(4)
            if kind == 0:
                return self._with_other_bytes(value)
            if kind == 1:
                return value + value[:4]
            changed = value[: place & ~3] + number + value[(place & ~3) + 4 :]
            return changed[: len(value)]
        if type(value) is int:
            return draw.choice((value + 1, max(0, value - 1), draw.randrange(300), 65535, 2**31 - 1))
        if type(value) is float:
            return draw.choice((0.0, -1.0, 0.5, 1e-30, 1e30))
        return draw.choice(EXTREMES)

    def _with_other_fields(self, data: bytes) -> bytes:
        """The same tree with one node changed."""
        try:
            tree = msgpack.unpackb(data, strict_map_key=False)
        except (ValueError, msgpack.UnpackException):
            return data
        node, draw = tree, self._draw
        while isinstance(node, list) and node:
            place = draw.randrange(len(node))
            if isinstance(node[place], list) and node[place] and draw.random() < 0.8:
                node = node[place]
                continue
            match draw.randrange(10):
                case 0:
                    del node[place]
                case 1:
                    node.insert(place, draw.choice(EXTREMES))
                case 2:
                    node[place] = draw.choice(EXTREMES)
                case _:
                    node[place] = self._alike(node[place])
            break
        try:
            packed: bytes = msgpack.packb(tree)
        except (OverflowError, ValueError, TypeError):
            return data
        return packed
