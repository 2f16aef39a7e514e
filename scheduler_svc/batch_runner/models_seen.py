"""When which model was served last: lines for one that has gone wait a while for it to come back."""

from __future__ import annotations

from collections.abc import Iterable

from scheduler_svc.frontend.models import ServedModel


class ModelsSeen:
    """`now` is monotonic. Holds no more names than were ever served."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._seen_at: dict[str, float] = {}
        self._first_at: float | None = None

    def look(self, served: Iterable[ServedModel], now: float) -> None:
        """To be called again and again."""
        for model in served:
            self._seen_at[model.name] = now
            if self._first_at is None:
                self._first_at = now

    def may_come(self, name: str, now: float) -> bool:
        """Whether a model that is not served may be so soon: counted from when it, or the first one, was seen."""
        since = self._seen_at.get(name, self._first_at)
        return since is None or now - since < self._patience_s
