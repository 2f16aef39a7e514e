"""Where the reasoning of one sequence ends: the grammar bounds what comes behind it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from common.wire import Constraint


class Reasoning:
    """Looks for its end in the tokens that the sequence has generated, at each of them once."""

    def __init__(self, constraint: Constraint) -> None:
        self._start, self._end = constraint.reasoning_start, constraint.reasoning_end
        self._num_seen = 0
        self._length: int | None = 0 if self._end < 0 else None

    @property
    def start(self) -> int | None:
        """The token that would begin it, if it came first; None: the sequence begins within it, or there is none."""
        return self._start if self._end >= 0 and self._start >= 0 else None

    def length(self, generated: NDArray[np.int32]) -> int | None:
        """How many of the tokens are reasoning, the one that ends it included; None: it has not ended.

        While the first token is still to tell whether there is any, 0. The tokens only ever grow.
        """
        if self._length is None and len(generated) > self._num_seen:
            if self._num_seen == 0 and self.start is not None and int(generated[0]) != self.start:
                self._length = 0
            else:
                ends = np.flatnonzero(generated[self._num_seen :] == self._end)
                self._length = self._num_seen + int(ends[0]) + 1 if len(ends) else None
            self._num_seen = len(generated)
        if self._length is None and not len(generated) and self.start is not None:
            return 0
        return self._length
