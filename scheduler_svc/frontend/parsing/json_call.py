"""One call written as JSON, read as it comes.

A value ends where its brackets and quotes say. Whether what is between them is JSON is not asked: arguments are passed
on as the model writes them, while it writes them, and a client checks them, as OpenAI's API tells it to.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from enum import Enum, auto
from typing import Any

SPACE = re.compile(r"[ \t\r\n]*")
MAX_HEADER = 256
"""Characters between a marker and the arguments in Mistral's newer format: the name and its own markup."""
_IN_STRING = re.compile(r'["\\]')
_BRACKET = re.compile(r'["{}\[\]]')
_SCALAR_END = re.compile(r"[,}\]\s]")
_HEADER_CHARACTERS = re.compile(r"[A-Za-z0-9_.:/\[\]-]*")
_HEADER = re.compile(r"([A-Za-z0-9_.:/-]+)(?:\[CALL_ID\][A-Za-z0-9]+)?(?:\[ARGS\])?")
ARGUMENTS = ("arguments", "parameters")


class ValueEnd:
    """Finds the end of one JSON value, which begins with the first text fed."""

    __slots__ = ("_depth", "_escaped", "_in_string", "_is_scalar")

    def __init__(self, first: str) -> None:
        """`first`: its first character."""
        self._depth, self._escaped, self._in_string = 0, False, False
        self._is_scalar = first not in '"{['

    def feed(self, data: str, place: int) -> tuple[int, bool]:
        """How far the value reaches in this text, and whether it ends there."""
        if self._is_scalar:
            found = _SCALAR_END.search(data, place)
            return (len(data), False) if found is None else (found.start(), True)
        while place < len(data):
            if self._escaped:
                self._escaped, place = False, place + 1
                continue
            found = (_IN_STRING if self._in_string else _BRACKET).search(data, place)
            if found is None:
                return len(data), False
            place = found.end()
            self._take(found[0])
            if not (self._depth or self._in_string or self._escaped):
                return place, True
        return place, False

    def _take(self, character: str) -> None:
        if character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = not self._in_string
        else:
            self._depth += 1 if character in "{[" else -1


class Status(Enum):
    READING = auto()
    DONE = auto()
    FAILED = auto()
    """It is no call, or is none any more."""


State = Callable[[str, int], int]


class JsonCall:
    """`{"name": …, "arguments": {…}}`, members in any order; `parameters` is another word for arguments.

    `name` is set once the call is certain: when its name is known and its arguments have begun. `take` then gives
    these as they come. Other members are passed over.
    """

    def __init__(self, known: frozenset[str] | None = None, *, needs_arguments: bool = False) -> None:
        """`known`: names that it may have, where not any. Unless `needs_arguments`, none at all mean `{}`."""
        self.status = Status.READING
        self.name: str | None = None
        self._known, self._needs_arguments = known, needs_arguments
        self._state: State = self._start
        self._said: str | None = None
        """The name, before the call is certain."""
        self._arguments: list[str] = []
        """What came of them and was not taken."""
        self._told = False
        """There are arguments."""
        self._key = ""
        self._kept: list[str] = []
        self._end = ValueEnd('"')

    def feed(self, data: str, place: int) -> int:
        """Read on. Returns the place up to which the text belongs to the call."""
        while place < len(data) and self.status is Status.READING:
            place = self._state(data, place)
        return place

    def take(self) -> str:
        """Arguments since the last time; none before the call is certain."""
        if self.name is None:
            return ""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    # --- states: each reads on from a place and returns the next; what it cannot read it leaves ---

    def _start(self, data: str, place: int) -> int:
        return self._expect(data, place, {"{": self._member})

    def _member(self, data: str, place: int) -> int:
        place = _skip_space(data, place)
        if place < len(data) and data[place] == '"':
            self._kept, self._end, self._state = [], ValueEnd('"'), self._in_key
            return place
        return self._expect(data, place, {"}": self._close})

    def _in_key(self, data: str, place: int) -> int:
        end, complete = self._end.feed(data, place)
        self._kept.append(data[place:end])
        if complete:
            key = _parsed("".join(self._kept))
            self._key = key if isinstance(key, str) else ""
            self._state = self._colon
        return end

    def _colon(self, data: str, place: int) -> int:
        return self._expect(data, place, {":": self._value})

    def _value(self, data: str, place: int) -> int:
        place = _skip_space(data, place)
        if place == len(data):
            return place
        self._kept, self._end = [], ValueEnd(data[place])
        is_object = self._key in ARGUMENTS and not self._told and data[place] == "{"
        self._state = self._in_arguments if is_object else self._in_value
        if is_object:
            self._told = True
            self._become_certain()
        return place

    def _in_arguments(self, data: str, place: int) -> int:
        end, complete = self._end.feed(data, place)
        self._arguments.append(data[place:end])
        if complete:
            self._state = self._after_value
        return end

    def _in_value(self, data: str, place: int) -> int:
        end, complete = self._end.feed(data, place)
        self._kept.append(data[place:end])
        if complete:
            self._state = self._after_value
            self._take_value(_parsed("".join(self._kept)))
        return end

    def _take_value(self, value: Any) -> None:
        """Of a member whose value is no object of arguments."""
        if self._key == "name" and self._said is None:
            if not isinstance(value, str) or not value or (self._known is not None and value not in self._known):
                self.status = Status.FAILED
                return
            self._said = value
        elif self._key in ARGUMENTS and not self._told:
            text = "{}" if value is None else value
            if not isinstance(text, str) or not isinstance(_parsed(text), dict):
                self.status = Status.FAILED
                return
            self._told = True
            self._arguments.append(text)
        self._become_certain()

    def _after_value(self, data: str, place: int) -> int:
        return self._expect(data, place, {",": self._member, "}": self._close})

    def _close(self, data: str, place: int) -> int:
        """Entered with the closing bracket still to be read."""
        if not self._told and not self._needs_arguments:
            self._told = True
            self._arguments.append("{}")
        self._become_certain()
        if self.name is None:
            self.status = Status.FAILED
            return place
        self.status = Status.DONE
        return place + 1

    def _expect(self, data: str, place: int, following: dict[str, State]) -> int:
        """Space, then one of these characters. A closing bracket is left to its state."""
        place = _skip_space(data, place)
        if place == len(data):
            return place
        state = following.get(data[place])
        if state is None:
            self.status = Status.FAILED
            return place
        self._state = state
        return place if state == self._close else place + 1

    def _become_certain(self) -> None:
        if self._told:
            self.name = self._said


class MistralCall(JsonCall):
    """What follows `[TOOL_CALLS]`: an array of calls, of which this is the first, or `name{…}`."""

    def __init__(self) -> None:
        super().__init__()
        self.in_array = False
        self._header = ""

    def _start(self, data: str, place: int) -> int:
        place = _skip_space(data, place)
        if place == len(data):
            return place
        if data[place] == "[" and not self.in_array:
            self.in_array = True
            return place + 1
        if data[place] == "{" or self.in_array:
            return super()._start(data, place)
        self._state = self._in_header
        return place

    def _in_header(self, data: str, place: int) -> int:
        room = MAX_HEADER - len(self._header)
        found = _HEADER_CHARACTERS.match(data, place, min(len(data), place + room))
        end = place if found is None else found.end()
        self._header += data[place:end]
        if end == len(data):
            return end
        header = _HEADER.fullmatch(self._header)
        if data[end] != "{" or header is None:
            self.status = Status.FAILED
            return end
        self._said, self._told, self._end, self._state = header[1], True, ValueEnd("{"), self._in_bare_arguments
        self._become_certain()
        return end

    def _in_bare_arguments(self, data: str, place: int) -> int:
        place = self._in_arguments(data, place)
        if self._state == self._after_value:
            self.status = Status.DONE
        return place


def _skip_space(data: str, place: int) -> int:
    found = SPACE.match(data, place)
    return place if found is None else found.end()


def _parsed(text: str) -> Any:
    """The JSON value that a text is; one of no type that JSON has, where it is none."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return ...
