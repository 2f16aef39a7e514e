"""Which executors an operator wants paused, by name: also while they are not attached."""

from __future__ import annotations

MAX_PAUSES = 1024
"""The oldest is forgotten for one more."""


class Pauses:
    """A pause holds until resume or release, whatever becomes of the connection or the process meanwhile."""

    def __init__(self) -> None:
        self._model_of: dict[str, str] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._model_of

    def __len__(self) -> int:
        return len(self._model_of)

    def without(self, attached: set[str]) -> tuple[str, ...]:
        """Those that are not attached, the oldest pause first."""
        return tuple(name for name in self._model_of if name not in attached)

    def add(self, name: str, model: str) -> None:
        self._model_of.pop(name, None)
        self._model_of[name] = model
        if len(self) > MAX_PAUSES:
            del self._model_of[next(iter(self._model_of))]

    def end(self, name: str) -> bool:
        """Forget the pause of an executor. Returns whether there was one."""
        return self._model_of.pop(name, None) is not None

    def end_of_model(self, model: str) -> bool:
        """Forget those of all executors of a model. Returns whether there were any."""
        names = [name for name, of in self._model_of.items() if of == model]
        for name in names:
            del self._model_of[name]
        return bool(names)
