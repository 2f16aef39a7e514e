"""What a sequence may say: a grammar as text, allowed tokens, and runs of tokens that may not come."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from common.wire.codec import Message, message
from common.wire.fields import MAX_TOKENS, TOKEN_IDS, Column, Int, Text, WireError

MAX_SOURCE = 1 << 18
"""Characters in the source of a grammar."""
MAX_BAD_WORDS = 1024


class Language(IntEnum):
    """What the source of a grammar is written in."""

    NONE = 0
    JSON_SCHEMA = 1
    JSON_SCHEMA_COMPACT = 2
    """Without white space between its tokens."""
    REGEX = 3
    EBNF = 4


@message(kind=-21)
@dataclass(frozen=True, slots=True, eq=False)
class Constraint(Message):
    """Bounds of a sequence's tokens, all of which hold together. The defaults bound nothing."""

    language: Annotated[int, Int(0, max(Language).value)] = 0
    source: Annotated[str, Text(MAX_SOURCE)] = ""
    allowed_ids: Annotated[NDArray[np.int32], TOKEN_IDS] = field(default_factory=lambda: np.empty(0, np.int32))
    """The only tokens that may be drawn; empty: all."""
    bad_widths: Annotated[NDArray[np.uint16], Column("u2", MAX_BAD_WORDS)] = field(
        default_factory=lambda: np.empty(0, np.uint16)
    )
    bad_ids: Annotated[NDArray[np.int32], TOKEN_IDS] = field(default_factory=lambda: np.empty(0, np.int32))
    """Runs of tokens that may not be generated, laid end to end; each as long as its place in `bad_widths` says."""
    reasoning_end: Annotated[int, Int(-1, MAX_TOKENS)] = -1
    """The grammar bounds what comes behind the first such token; -1: all of it."""
    reasoning_start: Annotated[int, Int(-1, MAX_TOKENS)] = -1
    """There is reasoning only if this is the first token; -1: the sequence begins within it."""

    def check(self, path: str) -> None:
        if bool(self.language) != bool(self.source):
            raise WireError(f"{path}.source: a grammar needs its language and its source")
        if self.reasoning_end >= 0 and not self.language:
            raise WireError(f"{path}.reasoning_end: there is no grammar to begin behind it")
        if self.reasoning_start >= 0 and self.reasoning_end < 0:
            raise WireError(f"{path}.reasoning_start: reasoning needs its end")
        if len(self.bad_widths) and not int(self.bad_widths.min()):
            raise WireError(f"{path}.bad_widths: an empty run")
        if int(self.bad_widths.sum(dtype=np.int64)) != len(self.bad_ids):
            raise WireError(f"{path}.bad_widths: do not add up to the number of tokens")

    @property
    def bounds(self) -> bool:
        """Whether it bounds anything."""
        return bool(self.language or len(self.allowed_ids) or len(self.bad_ids))


UNBOUND = Constraint()
