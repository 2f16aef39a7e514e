"""Field types of wire messages: how one value is packed for msgpack, and how a received one is checked.

`unpack` raises `WireError` naming the field; it never trusts a size, a type or a range from the far side. `pack`
refuses what the far side would refuse, so that a mistake shows where it is made.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class WireError(ValueError):
    """A message that this protocol does not allow. The text names the message and the field."""


class FieldType(Protocol):
    """Packs and checks one field."""

    def pack(self, value: Any) -> Any: ...

    def unpack(self, raw: Any, path: str) -> Any: ...


class Int:
    """An integer within [low, high]."""

    def __init__(self, low: int, high: int) -> None:
        self.low, self.high = low, high

    def pack(self, value: Any) -> int:
        number = int(operator.index(value))
        if not self.low <= number <= self.high:
            raise WireError(f"expected an integer in [{self.low}, {self.high}], got {number}")
        return number

    def unpack(self, raw: Any, path: str) -> int:
        if type(raw) is not int or not self.low <= raw <= self.high:
            raise WireError(f"{path}: expected an integer in [{self.low}, {self.high}], got {_show(raw)}")
        return raw


class Float:
    """A finite float64."""

    def pack(self, value: Any) -> float:
        number = float(value)
        if not math.isfinite(number):
            raise WireError(f"expected a finite number, got {number}")
        return number

    def unpack(self, raw: Any, path: str) -> float:
        if type(raw) not in (float, int) or not math.isfinite(raw):
            raise WireError(f"{path}: expected a finite number, got {_show(raw)}")
        return float(raw)


class Bool:
    def pack(self, value: Any) -> bool:
        return bool(value)

    def unpack(self, raw: Any, path: str) -> bool:
        if type(raw) is not bool:
            raise WireError(f"{path}: expected a boolean, got {_show(raw)}")
        return raw


class Text:
    """UTF-8 text of at most `max_length` characters.

    `shorten` is for texts that only people read: what is too long is cut and what is no UTF-8 replaced when packing.
    """

    def __init__(self, max_length: int, *, shorten: bool = False) -> None:
        self.max_length, self.shorten = max_length, shorten

    def pack(self, value: Any) -> str:
        if not isinstance(value, str):
            raise WireError(f"expected text, got {type(value).__name__}")
        if self.shorten:
            return value[: self.max_length].encode("utf-8", "replace").decode()
        if len(value) > self.max_length:
            raise WireError(f"expected text of at most {self.max_length} characters, got {len(value)}")
        value.encode()  # raises UnicodeEncodeError on half a surrogate pair
        return str(value)

    def unpack(self, raw: Any, path: str) -> str:
        if type(raw) is not str or len(raw) > self.max_length:
            raise WireError(f"{path}: expected text of at most {self.max_length} characters, got {_show(raw)}")
        return raw


class Blob:
    """Bytes, at most `max_length` of them."""

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length

    def pack(self, value: Any) -> bytes:
        if not isinstance(value, bytes | bytearray | memoryview):
            raise WireError(f"expected bytes, got {type(value).__name__}")
        if len(value) > self.max_length:
            raise WireError(f"expected at most {self.max_length} bytes, got {len(value)}")
        return bytes(value)

    def unpack(self, raw: Any, path: str) -> bytes:
        if type(raw) is not bytes or len(raw) > self.max_length:
            raise WireError(f"{path}: expected at most {self.max_length} bytes, got {_show(raw)}")
        return raw


class Column:
    """A one-dimensional numpy array, raw little-endian on the wire, at most `max_items` long."""

    def __init__(self, dtype: str, max_items: int) -> None:
        self.dtype: np.dtype[Any] = np.dtype(f"<{dtype}")
        self.max_items = max_items
        self._empty: NDArray[Any] = np.frombuffer(b"", self.dtype)

    def pack(self, value: Any) -> bytes:
        array = np.asarray(value)
        if array.ndim != 1 or len(array) > self.max_items:
            raise WireError(f"expected a column of at most {self.max_items} items, got shape {array.shape}")
        if not len(array):
            return b""
        if array.dtype != self.dtype:
            array = self._convert(array)
        return array.tobytes()

    def _convert(self, array: NDArray[Any]) -> NDArray[Any]:
        """Change the dtype, refusing values that would wrap."""
        if self.dtype.kind in "iu":
            info = np.iinfo(self.dtype)
            if array.dtype.kind not in "iu" or array.min() < info.min or array.max() > info.max:
                raise WireError(f"column of {self.dtype}: value out of range or not an integer")
        elif array.dtype.kind not in "iuf":
            raise WireError(f"column of {self.dtype}: not numbers")
        with np.errstate(over="ignore"):  # beyond float32 lies infinity
            return array.astype(self.dtype)

    def unpack(self, raw: Any, path: str) -> NDArray[Any]:
        if type(raw) is not bytes or len(raw) % self.dtype.itemsize:
            raise WireError(f"{path}: expected a column of {self.dtype}, got {_show(raw)}")
        if not raw:
            return self._empty
        if len(raw) > self.max_items * self.dtype.itemsize:
            raise WireError(f"{path}: more than {self.max_items} items")
        return np.frombuffer(raw, self.dtype)


class ListOf:
    """A list of at most `max_items` values of one field type."""

    def __init__(self, item: FieldType, max_items: int) -> None:
        self.item, self.max_items = item, max_items

    def pack(self, value: Any) -> list[Any]:
        if len(value) > self.max_items:
            raise WireError(f"expected at most {self.max_items} items, got {len(value)}")
        return [self.item.pack(v) for v in value]

    def unpack(self, raw: Any, path: str) -> tuple[Any, ...]:
        if type(raw) is not list or len(raw) > self.max_items:
            raise WireError(f"{path}: expected a list of at most {self.max_items} items, got {_show(raw)}")
        return tuple(self.item.unpack(v, f"{path}[{i}]") for i, v in enumerate(raw))


class MapOf:
    """A map from short text to values of one field type, at most `max_items` long."""

    def __init__(self, value: FieldType, max_items: int, max_key: int = 256) -> None:
        self.value, self.max_items, self.key = value, max_items, Text(max_key)

    def pack(self, value: Mapping[str, Any]) -> dict[str, Any]:
        if len(value) > self.max_items:
            raise WireError(f"expected at most {self.max_items} items, got {len(value)}")
        return {self.key.pack(k): self.value.pack(v) for k, v in value.items()}

    def unpack(self, raw: Any, path: str) -> dict[str, Any]:
        if type(raw) is not dict or len(raw) > self.max_items:
            raise WireError(f"{path}: expected a map of at most {self.max_items} items, got {_show(raw)}")
        return {self.key.unpack(k, f"{path} key"): self.value.unpack(v, f"{path}[{_show(k)}]") for k, v in raw.items()}


def _show(raw: Any) -> str:
    """A bounded rendering of junk for an error text; long values show their type and size only."""
    if isinstance(raw, bytes | str | list | dict) and len(raw) > 20:
        return f"{type(raw).__name__} of length {len(raw)}"
    return repr(raw)[:60]


MAX_SLOTS = 65_535
MAX_TOKENS = 1 << 24
U16 = Int(0, 0xFFFF)
U32 = Int(0, 0xFFFF_FFFF)
U64 = Int(0, 0xFFFF_FFFF_FFFF_FFFF)
I32 = Int(-0x8000_0000, 0x7FFF_FFFF)
COUNT = Int(0, 0x7FFF_FFFF)
F64 = Float()
BOOL = Bool()
SLOTS = Column("u2", MAX_SLOTS)
TOKEN_IDS = Column("i4", MAX_TOKENS)
BLOCKS = Column("i4", MAX_TOKENS)
STREAMS = Column("u4", MAX_SLOTS)
NAME = Text(256)
MESSAGE = Text(4096, shorten=True)
