"""What frontends know of the models: their cards, with all tokenizer files, go out only when they have changed."""

from __future__ import annotations

from dataclasses import fields

from common.wire import ModelCard, Serving
from scheduler_svc.core import Scheduler


class Offer:
    """What was sent to the frontends last. It may hold 192 MB of tokenizer files, and lanes come and go often."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.told = Serving((), ())
        """What all frontends know, and a new one must be told; what has changed since comes with the next `news`."""

    def news(self, now: float) -> Serving | None:
        """The models that can be asked for, where they are others than at the last call."""
        models, capacity = self._scheduler.availability.models, self._scheduler.availability.kv_capacity
        names = [name for name in models if self._scheduler.availability.is_offered(name, now)]
        told = self.told
        self.told = Serving(tuple(models[name] for name in names), tuple(capacity[name] for name in names))
        return None if _is_same(self.told, told) else self.told


def _is_same(one: Serving, other: Serving) -> bool:
    return (
        one.kv_capacity == other.kv_capacity
        and len(one.models) == len(other.models)
        and all(map(_is_same_card, one.models, other.models))
    )


def _is_same_card(one: ModelCard, other: ModelCard) -> bool:
    """Each executor brings a card of its own; files are compared only where one has come since the last time."""
    return one is other or all(getattr(one, field.name) == getattr(other, field.name) for field in fields(ModelCard))
