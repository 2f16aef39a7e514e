"""What a scripted executor does: which tokens it says, when it is slow, and how it fails."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.wire import SamplingParams

Choose = Callable[[NDArray[np.int32], int, SamplingParams], int]
"""(known tokens, prompt length, params) -> next token."""


class Action(StrEnum):
    """What can go wrong at a plan."""

    DIE_BEFORE = "die_before"
    """The process ends without having computed."""
    DIE_AFTER = "die_after"
    """The process ends with the iteration computed and its result unsent."""
    FAULT = "fault"
    JUNK = "junk"
    """Bytes that are no message, then the result."""
    DOUBLE = "double"
    """The result twice."""
    WRONG_EPOCH = "wrong_epoch"
    """The result under an epoch that never was, then the right one."""
    SHORT = "short"
    """A result with one token fewer than it must have."""
    EXTRA = "extra"
    """A result with one token more than it must have."""
    STALE = "stale"
    """The result of the plan before, once more, then the right one."""
    BAD_FINISH = "bad_finish"
    """A result with a finish code that there is not."""
    BAD_TOKEN = "bad_token"
    """A result whose first token is outside the vocabulary."""
    HANG = "hang"
    """No answer, while the heartbeat goes on."""
    SILENCE = "silence"
    """No answer and no heartbeat, as a stopped process."""


@dataclass(frozen=True)
class Forced:
    """Tokens for every sequence whose prompt contains `marker` (an empty one: for every sequence), then EOS."""

    marker: tuple[int, ...]
    tokens: tuple[int, ...]

    def applies(self, prompt: NDArray[np.int32]) -> bool:
        count = len(self.marker)
        if not count:
            return True
        if len(prompt) < count:
            return False
        windows = np.lib.stride_tricks.sliding_window_view(prompt, count)
        return bool((windows == np.array(self.marker, np.int32)).all(axis=1).any())


@dataclass
class Script:
    """Without any of it: a pseudo language model, never an EOS, no delay, no failure.

    Plans are counted from 1 over the life of the executor, or from when it was given this script, whatever their epoch.
    """

    alphabet: tuple[int, ...] = ()
    """Tokens the pseudo language model picks from; empty: all but EOS."""
    forced: tuple[Forced, ...] = ()
    choose: Choose | None = None
    eos_after: int | None = None
    """EOS instead of the token that would follow so many generated ones (min_tokens and ignore_eos stand above it)."""
    delay_s: float = 0.0
    """Seconds that every iteration takes."""
    actions: dict[int, Action] = field(default_factory=dict)
    """By number of plan."""
    poison_token: int | None = None
    """A plan that works on a sequence with this token in its prompt meets `poison_action`."""
    poison_action: Action = Action.FAULT
    name_poisoned: bool = True
    """Whether a fault over a poisoned sequence names its slot."""
    chosen_logprob: float | None = None
    """Logprob of every sampled token; None: a number that depends on the token."""

    @classmethod
    def from_json(cls, text: str) -> Script:
        """A script from a JSON object with fields as above. Raises ValueError naming what is wrong."""
        raw: Any = json.loads(text)
        if not isinstance(raw, dict):
            raise ValueError("script: expected a JSON object")
        unknown = set(raw) - set(cls.__dataclass_fields__) | {"choose"} & set(raw)
        if unknown:
            raise ValueError(f"script: unknown field {sorted(unknown)[0]!r}")
        raw["alphabet"] = tuple(raw.get("alphabet", ()))
        raw["forced"] = tuple(Forced(tuple(f["marker"]), tuple(f["tokens"])) for f in raw.get("forced", ()))
        raw["actions"] = {int(number): Action(action) for number, action in raw.get("actions", {}).items()}
        raw["poison_action"] = Action(raw.get("poison_action", Action.FAULT))
        return cls(**raw)
