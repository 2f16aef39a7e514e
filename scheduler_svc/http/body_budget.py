"""Bounds the bodies that a frontend holds at a time, all requests together."""

from __future__ import annotations

from types import TracebackType

from scheduler_svc.http.errors import unavailable

RETRY_AFTER_S = 1
"""Bodies are worked off within a fraction of a second; who comes again then mostly finds room."""


class BodyBudget:
    """Bytes are taken as they arrive, not as they are announced: who announces much and sends little takes little."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_held = 0

    def hold(self) -> HeldBody:
        """The part of one request, empty at first."""
        return HeldBody(self)


class HeldBody:
    """What one request holds, until the end of a `with` block, or less long."""

    __slots__ = ("_budget", "_size")

    def __init__(self, budget: BodyBudget) -> None:
        self._budget, self._size = budget, 0

    def __enter__(self) -> HeldBody:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def grow(self, num_bytes: int) -> None:
        """So many bytes more came. Raises `ApiError` 503 where there is no room for them."""
        budget = self._budget
        if budget.num_held + num_bytes > budget.max_bytes:
            text = "the bodies of other requests take all the memory that there is for them"
            raise unavailable(text, "overloaded", RETRY_AFTER_S)
        budget.num_held += num_bytes
        self._size += num_bytes

    def release(self) -> None:
        """The body is needed no more. Safe to call again."""
        self._budget.num_held -= self._size
        self._size = 0
