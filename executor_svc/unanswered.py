"""When a connection is given up on which Hellos find no answer."""

from __future__ import annotations

LONGEST_S = 120.0
"""Patience grows no further."""


class Unanswered:
    """A scheduler answers each Hello: where no answer comes, the connection leads to none. Clocks are passed in.

    The patience doubles with each connection that is given up: a Hello holds the tokenizer, perhaps tens of megabytes,
    and a line on which that takes longer than the first patience would never bring one across.
    """

    def __init__(self, patience_s: float) -> None:
        """`patience_s`: that with the first connection."""
        self._first_s = self._patience_s = patience_s
        self._since: float | None = None
        """When the first Hello was sent after which nothing came."""

    def dialled(self) -> None:
        """The connection is a new one."""
        self._since = None

    def asked(self, now: float) -> None:
        if self._since is None:
            self._since = now

    def answered(self) -> None:
        self._since, self._patience_s = None, self._first_s

    def gives_up(self, now: float) -> bool:
        """Whether to dial anew; if so, the next connection is given more time."""
        if self._since is None or now - self._since <= self._patience_s:
            return False
        self._patience_s = max(self._first_s, min(LONGEST_S, 2 * self._patience_s))
        return True
