"""One codec for every message: a msgpack array `[kind, field, field, …]`, fields in the order of their declaration.

Declaring a message:

    @message(kind=17)
    @dataclass(frozen=True, slots=True, eq=False)
    class Leaving(Message):
        epoch: Annotated[int, U64]

The field table is built once, when the class is declared. Decoding checks the number of fields and each field.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Annotated, Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

import msgpack

from common.wire.fields import FieldType, WireError

__all__ = ["MAX_MESSAGE_BYTES", "PROTOCOL_VERSION", "Message", "Part", "WireError", "decode", "encode", "message"]

PROTOCOL_VERSION = 4
"""Raised with every incompatible change of a message. An executor of another version is refused at attach."""

MAX_MESSAGE_BYTES = 256 << 20
"""No message may be larger; sockets refuse larger frames before they are read (`ZMQ_MAXMSGSIZE`)."""

SMALL_MESSAGE_BYTES = 8192
"""A message of this size is parsed at once: its headers cannot announce more than some megabytes."""

_kinds: dict[int, type[Message]] = {}
_parts: dict[int, type[Message]] = {}


class Message:
    """Base of all wire messages. Two are equal when their encodings are."""

    __slots__ = ()
    kind: ClassVar[int] = -1
    wire_fields: ClassVar[tuple[tuple[str, FieldType], ...]] = ()
    wire_values: ClassVar[Callable[[Any], tuple[Any, ...]]] = staticmethod(lambda value: ())
    """The fields of a message, in their order."""

    def check(self, path: str) -> None:
        """Check what holds between fields. Raises `WireError`."""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and isinstance(other, Message) and encode(self) == encode(other)

    def __hash__(self) -> int:
        return hash(encode(self))


M = TypeVar("M", bound=Message)


def message(kind: int) -> Callable[[type[M]], type[M]]:
    """Register a dataclass as the message of this kind (kinds below 1 are parts of messages, never sent alone)."""

    def register(cls: type[M]) -> type[M]:
        hints = get_type_hints(cls, include_extras=True)
        hints.pop("kind", None)
        hints.pop("wire_fields", None)
        hints.pop("wire_values", None)
        table = []
        for name, hint in hints.items():
            if get_origin(hint) is not Annotated:
                raise TypeError(f"{cls.__name__}.{name}: declare it as Annotated[type, FieldType]")
            table.append((name, get_args(hint)[1]))
        cls.kind, cls.wire_fields = kind, tuple(table)
        names = [name for name, _ in table]
        # With one name alone attrgetter makes no tuple.
        cls.wire_values = staticmethod(
            attrgetter(*names) if len(names) > 1 else lambda value: (getattr(value, *names),)
        )
        if (_kinds if kind > 0 else _parts).setdefault(kind, cls) is not cls:
            raise TypeError(f"message kind {kind} declared twice")
        return cls

    return register


class Part:
    """Field type of a message inside a message.

    A part that is as its defaults make it, as logprobs mostly are, is one object for all, and costs next to nothing.
    """

    def __init__(self, cls: type[Message]) -> None:
        self.cls = cls
        self._usual: tuple[Message, list[Any]] | None = None
        """The part of defaults and its encoding; no object where the class has fields without default."""

    def _defaults(self) -> tuple[Message | None, list[Any]]:
        if self._usual is None:
            try:
                made = self.cls()
            except TypeError:
                return None, []
            self._usual = made, _pack(made, self.cls)
        return self._usual

    def pack(self, value: Any) -> list[Any]:
        usual, packed = self._usual or self._defaults()
        return packed if value is usual and usual is not None else _pack(value, self.cls)

    def unpack(self, raw: Any, path: str) -> Message:
        usual, packed = self._usual or self._defaults()
        return usual if usual is not None and type(raw) is list and raw == packed else _build(self.cls, raw, path)


def _pack(value: Any, cls: type[Message]) -> list[Any]:
    table = cls.wire_fields
    packed: list[Any] = []
    try:
        for (_, field), item in zip(table, cls.wire_values(value), strict=True):
            packed.append(field.pack(item))
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        raise WireError(f"{table[len(packed)][0]}: {error}") from error
    return packed


def _build(cls: type[Message], raw: Any, path: str) -> Message:
    """Paths are put together only for an error: each level puts its own before what the one below says."""
    table = cls.wire_fields
    if type(raw) is not list or len(raw) != len(table):
        raise WireError(f"{path}: expected an array of {len(table)} fields")
    try:
        built = cls(*[field.unpack(item, name) for (name, field), item in zip(table, raw, strict=True)])
    except WireError as error:
        raise WireError(f"{path}.{error}") from error
    built.check(path)
    return built


def encode(value: Message) -> bytes:
    """Encode a message. Raises `WireError` when a value cannot be carried."""
    try:
        fields = [value.kind, *_pack(value, type(value))]
    except WireError as error:
        raise WireError(f"{type(value).__name__}.{error}") from error
    data: bytes = msgpack.packb(fields, use_bin_type=True)
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError(f"{type(value).__name__}: {len(data)} bytes are over the limit of {MAX_MESSAGE_BYTES}")
    return data


def decode(data: bytes) -> Message:
    """Decode and check a message. Raises `WireError` on anything that is not exactly one known message."""
    raw = parse(data)
    cls = _kinds.get(raw[0])
    if cls is None:
        raise WireError(f"unknown kind of message {raw[0]}")
    return _build(cls, raw[1:], cls.__name__)


def parse(data: bytes) -> list[Any]:
    """The unchecked array of a message; its first item is an int. Raises `WireError` when the bytes are none.

    Memory is bounded by the size of `data`: what a header announces counts only when it is there.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError(f"message of {len(data)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    try:
        if len(data) > SMALL_MESSAGE_BYTES:
            scan = msgpack.Unpacker(None, max_buffer_size=len(data))
            scan.feed(data)
            scan.skip()
        raw = msgpack.unpackb(data, raw=False, strict_map_key=True, use_list=True)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise WireError(f"not msgpack: {type(error).__name__}") from error
    if type(raw) is not list or not raw or type(raw[0]) is not int:
        raise WireError("expected an array that starts with the kind of message")
    return raw
