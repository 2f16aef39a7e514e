"""Which GPU each executor of `gilir up` takes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import count

NUMBERED = re.compile(r"(?:auto|cuda):(\d+)")


def spread(told: Sequence[str]) -> list[str]:
    """The device of each executor. `told`: what its settings say, `auto`, `cpu`, `cuda`, or with a number of a GPU.

    Those without a number get a GPU each, past the ones that are named. How many GPUs there are is known where torch
    is, not here: the executor itself takes `auto:N` for a CPU where there are none, and refuses a number too high.
    """
    named = {int(found[1]) for found in map(NUMBERED.fullmatch, told) if found}
    free = (number for number in count() if number not in named)
    return [f"{device}:{next(free)}" if device in ("auto", "cuda") else device for device in told]
