"""Turns parts of the core's state into what msgpack can carry, and back: one small codec for each shape of value.

Nothing is found by reflection: `snapshot` names every field of every class with the codec that carries it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np

from common.wire import Message, ModelCard
from common.wire.codec import Part
from scheduler_svc.core import Lane, SchedulerConfig, Sequence
from scheduler_svc.core.sequence import SwappedKv
from scheduler_svc.plan_log.format import FormatError, pack_frame
from scheduler_svc.plan_log.messages import pack_card, unpack_card

GONE = -1
"""Number of a sequence that has ended: heaps may still name it, in entries that are passed over."""


class Packing:
    """What the codecs know while they pack."""

    def __init__(self, schema: Mapping[type, Record], numbers: set[int]) -> None:
        self.schema, self.numbers = schema, numbers
        """Numbers of the sequences that are packed: those that are live, or that an iteration in flight holds."""
        self.cards: list[Any] = []
        self._place: dict[bytes, int] = {}

    def card(self, card: ModelCard) -> int:
        """The place of a card among the packed ones; lanes and models mostly share theirs."""
        packed = pack_card(card)
        key = blake2b(pack_frame(packed), digest_size=16).digest()
        if key not in self._place:
            self._place[key] = len(self.cards)
            self.cards.append(packed)
        return self._place[key]


class Restoring:
    """What the codecs know while they unpack."""

    def __init__(self, schema: Mapping[type, Record], config: SchedulerConfig, cards: list[Any]) -> None:
        self.schema, self.config = schema, config
        self.cards = [unpack_card(card) for card in cards]
        self.lanes: dict[int, Lane] = {}
        self.sequences: dict[int, Sequence] = {}
        self.fields: list[dict[str, Any]] = []
        """Fields, as far as they are restored, of the objects that are being restored; the innermost last."""


class Codec(Protocol):
    """Carries one value. `owner` is the object that it belongs to."""

    def pack(self, value: Any, owner: Any, packing: Packing) -> Any: ...

    def unpack(self, raw: Any, restoring: Restoring) -> Any: ...


class Record:
    """How an object of a class is carried: each of its fields with a codec, in the order in which they are restored."""

    def __init__(self, fields: Mapping[str, Codec]) -> None:
        self.fields = fields
        self._carried = [(name, codec.pack) for name, codec in fields.items() if not isinstance(codec, Given)]

    def pack(self, value: Any, packing: Packing) -> dict[str, Any]:
        """The fields of an object, but for those that are given at the restoring."""
        return {name: pack(getattr(value, name), value, packing) for name, pack in self._carried}

    def restore(self, made: Any, values: dict[str, Any], restoring: Restoring) -> None:
        """Set the fields of an object that has none yet. Raises `FormatError` for the fields of another version."""
        differ = values.keys() ^ {name for name, _ in self._carried}
        if differ:
            names = f"{type(made).__name__}: {', '.join(sorted(differ))}"
            raise FormatError(f"was written by another version of Gilir (state that differs: {names})")
        restored: dict[str, Any] = {}
        restoring.fields.append(restored)
        for name, codec in self.fields.items():
            restored[name] = codec.unpack(values.get(name), restoring)
            object.__setattr__(made, name, restored[name])
        restoring.fields.pop()


class Plain:
    """A number, text, bytes or None."""

    def pack(self, value: Any, owner: Any, packing: Packing) -> Any:
        return value

    def unpack(self, raw: Any, restoring: Restoring) -> Any:
        return raw


class Given:
    """Not carried: it follows from what is known at the restoring."""

    def __init__(self, value: Callable[[Restoring], Any]) -> None:
        self._value = value

    def pack(self, value: Any, owner: Any, packing: Packing) -> Any:
        return None

    def unpack(self, raw: Any, restoring: Restoring) -> Any:
        return self._value(restoring)


class Converted:
    """Carried as another type: a set as a sorted list, say."""

    def __init__(self, carried: Callable[[Any], Any], restored: Callable[[Any], Any]) -> None:
        self._carried, self._restored = carried, restored

    def pack(self, value: Any, owner: Any, packing: Packing) -> Any:
        return self._carried(value)

    def unpack(self, raw: Any, restoring: Restoring) -> Any:
        return self._restored(raw)


class Choice(Converted):
    """A member of an enumeration."""

    def __init__(self, kind: type[Enum]) -> None:
        super().__init__(lambda value: value.value, kind)


class Ints(Converted):
    """A long collection of whole numbers."""

    def __init__(self, into: Callable[[Iterable[int]], Any] = list) -> None:
        super().__init__(pack_ints, lambda raw: into(unpack_ints(raw)))


class IntMap(Converted):
    """A long dictionary of whole numbers, in its order."""

    def __init__(self) -> None:
        super().__init__(
            lambda value: [pack_ints(value.keys()), pack_ints(value.values())],
            lambda raw: dict(zip(*map(unpack_ints, raw), strict=True)),
        )


class IntTuples(Converted):
    """A long list of tuples of so many whole numbers."""

    def __init__(self, width: int) -> None:
        super().__init__(
            lambda value: np.array(value, "<i8").tobytes(),
            lambda raw: [tuple(row) for row in np.frombuffer(raw, "<i8").reshape(-1, width).tolist()],
        )


class Array:
    """A numpy array, bit for bit."""

    def pack(self, value: Any, owner: Any, packing: Packing) -> Any:
        return [value.dtype.str, list(value.shape), value.tobytes()]

    def unpack(self, raw: Any, restoring: Restoring) -> Any:
        dtype, shape, data = raw
        return np.frombuffer(data, dtype).reshape(shape).copy()


class Rows:
    """A matrix by slot, of whose rows only the beginning counts, and only where the slot is taken."""

    def __init__(self, length: str) -> None:
        self._length = length
        """The lane's column with the number of items that count."""

    def pack(self, value: Any, owner: Any, packing: Packing) -> Any:
        lengths = getattr(owner, self._length).tolist()
        taken = [slot for slot, sequence in enumerate(owner.occupant) if sequence is not None]
        return [value.dtype.str, list(value.shape), [value[slot, : lengths[slot]].tobytes() for slot in taken]]

    def unpack(self, raw: Any, restoring: Restoring) -> Any:
        dtype, shape, rows = raw
        matrix = np.zeros(shape, dtype)
        occupant = restoring.fields[-1]["occupant"]
        taken = [slot for slot, sequence in enumerate(occupant) if sequence is not None]
        for slot, data in zip(taken, rows, strict=True):
            row = np.frombuffer(data, dtype)
            matrix[slot, : len(row)] = row
        return matrix


class Chain(Converted):
    """A list of 128-bit digests."""

    def __init__(self) -> None:
        super().__init__(b"".join, lambda raw: [raw[place : place + 16] for place in range(0, len(raw), 16)])


class Digests:
    """A list of 128-bit digests, some of which may be None."""

    def pack(self, value: Any, owner: Any, packing: Packing) -> Any:
        places = [place for place, digest in enumerate(value) if digest is not None]
        return [len(value), pack_ints(places), b"".join(value[place] for place in places)]

    def unpack(self, raw: Any, restoring: Restoring) -> Any:
        length, places, data = raw
        digests: list[bytes | None] = [None] * length
        for i, place in enumerate(unpack_ints(places)):
            digests[place] = data[16 * i : 16 * i + 16]
        return digests


class Listed:
    """A list of values of one codec."""

    def __init__(self, item: Codec) -> None:
        self._item = item

    def pack(self, value: Any, owner: Any, packing: Packing) -> Any:
        return [self._item.pack(item, owner, packing) for item in value]

    def unpack(self, raw: Any, restoring: Restoring) -> Any:
        return [self._item.unpack(item, restoring) for item in raw]


class Tupled:
    """A tuple, each place with its codec."""

    def __init__(self, *items: Codec) -> None:
        self._items = items

    def pack(self, value: Any, owner: Any, packing: Packing) -> Any:
        return [codec.pack(item, owner, packing) for codec, item in zip(self._items, value, strict=True)]

    def unpack(self, raw: Any, restoring: Restoring) -> Any:
        return tuple(codec.unpack(item, restoring) for codec, item in zip(self._items, raw, strict=True))


class Mapped:
    """A dictionary, in its order."""

    def __init__(self, key: Codec, value: Codec, into: type[dict[Any, Any]] = dict) -> None:
        self._key, self._value, self._into = key, value, into

    def pack(self, value: Any, owner: Any, packing: Packing) -> Any:
        key, item = self._key, self._value
        return [[key.pack(k, owner, packing), item.pack(v, owner, packing)] for k, v in value.items()]

    def unpack(self, raw: Any, restoring: Restoring) -> Any:
        return self._into({self._key.unpack(k, restoring): self._value.unpack(v, restoring) for k, v in raw})


class OrNone:
    """A value of a codec, or None."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec

    def pack(self, value: Any, owner: Any, packing: Packing) -> Any:
        return None if value is None else self._codec.pack(value, owner, packing)

    def unpack(self, raw: Any, restoring: Restoring) -> Any:
        return None if raw is None else self._codec.unpack(raw, restoring)


class WirePart:
    """A part of a wire message."""

    def __init__(self, kind: type[Message]) -> None:
        self._part = Part(kind)

    def pack(self, value: Any, owner: Any, packing: Packing) -> Any:
        return self._part.pack(value)

    def unpack(self, raw: Any, restoring: Restoring) -> Any:
        return self._part.unpack(raw, "state")


class Card:
    """A model card."""

    def pack(self, value: Any, owner: Any, packing: Packing) -> Any:
        return packing.card(value)

    def unpack(self, raw: Any, restoring: Restoring) -> Any:
        return restoring.cards[raw]


class SequenceNumber:
    """A sequence, by its number; one that has ended is restored as a stranger of no queue."""

    def pack(self, value: Any, owner: Any, packing: Packing) -> Any:
        return value.number if value.number in packing.numbers else GONE

    def unpack(self, raw: Any, restoring: Restoring) -> Any:
        return restoring.sequences[raw]


class LaneEpoch:
    """A lane, by its epoch."""

    def pack(self, value: Any, owner: Any, packing: Packing) -> Any:
        return value.epoch

    def unpack(self, raw: Any, restoring: Restoring) -> Any:
        return restoring.lanes[raw]


class Swapped:
    """KV in a host pool."""

    def pack(self, value: Any, owner: Any, packing: Packing) -> Any:
        return [value.lane.epoch, value.blocks, value.computed]

    def unpack(self, raw: Any, restoring: Restoring) -> Any:
        epoch, blocks, computed = raw
        return SwappedKv(restoring.lanes[epoch], blocks, computed)


class Instance:
    """An object of one of some classes, by the fields that the schema names."""

    def __init__(self, *kinds: type) -> None:
        self._kinds = kinds

    def pack(self, value: Any, owner: Any, packing: Packing) -> Any:
        kind = self._kinds.index(type(value))
        return [kind, packing.schema[type(value)].pack(value, packing)]

    def unpack(self, raw: Any, restoring: Restoring) -> Any:
        kind, values = raw
        made = self._kinds[kind].__new__(self._kinds[kind])
        restoring.schema[self._kinds[kind]].restore(made, values, restoring)
        return made


def pack_ints(values: Collection[int]) -> bytes:
    return np.fromiter(values, "<i8", len(values)).tobytes()


def unpack_ints(raw: bytes) -> list[int]:
    values: list[int] = np.frombuffer(raw, "<i8").tolist()
    return values
