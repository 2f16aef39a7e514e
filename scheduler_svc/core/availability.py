"""Which models can be served, and since when not: what the hold time is counted from."""

from __future__ import annotations

from collections.abc import Iterator

from common.wire import ModelCard
from scheduler_svc.core.attachment import AttachError, cards_fit
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.lane import Lane
from scheduler_svc.core.model_queue import ModelQueue
from scheduler_svc.core.sequence import Sequence, WaitReason


class Availability:
    """What all lanes of a model together can take. The lanes and queues are the scheduler's, looked at here."""

    def __init__(self, config: SchedulerConfig, lanes: dict[int, Lane], queues: dict[str, ModelQueue]) -> None:
        self.config, self.lanes, self.queues = config, lanes, queues
        self.models: dict[str, ModelCard] = {}
        """The card that each model's latest executor brought."""
        self.kv_capacity: dict[str, int] = {}
        """Tokens of KV in each model's largest pool; when that goes, it still counts for the hold time."""
        self._vacant_since: dict[str, float] = {}
        """Since when a known model has had no lane that takes sequences."""
        self._shrunk_since: dict[str, float] = {}
        """Since when a model's lanes that take sequences have been too small for some that it had accepted, or may."""

    def lanes_of(self, model: str) -> list[Lane]:
        return [lane for lane in self.lanes.values() if lane.model.name == model]

    def admitting(self, model: str) -> list[Lane]:
        """Lanes that take new sequences."""
        return [lane for lane in self.lanes_of(model) if lane.admits]

    def is_offered(self, model: str, now: float) -> bool:
        """Whether requests for a known model are accepted: a lane takes them, or did within the hold time."""
        return model not in self._vacant_since or now - self._vacant_since[model] < self.config.hold_s

    def holds_larger(self, model: str) -> bool:
        """Whether the hold time runs for what none of the lanes that take a model's sequences can hold."""
        return model in self._shrunk_since

    def make_room(self, model: ModelCard) -> None:
        """Forget models that nobody serves or waits for, the longest vacant first, so that the cards stay bounded.

        Raises `AttachError` when there is no room for this one.
        """
        for vacant in list(self._vacant_since):
            if cards_fit(self.models, model):
                return
            if vacant != model.name and not len(self.queues[vacant]) and not self.lanes_of(vacant):
                for table in (self.models, self.queues, self.kv_capacity, self._vacant_since):
                    del table[vacant]
                self._shrunk_since.pop(vacant, None)
        if not cards_fit(self.models, model):
            raise AttachError("the models served make too many or too large cards for one more")

    def fewer_admit(self, model: str, now: float) -> None:
        """One lane of a model fewer takes new sequences."""
        self._review_spares(model)
        if not self.admitting(model):
            self._vacant_since.setdefault(model, now)
            reason = WaitReason.PAUSED if self.lanes_of(model) else WaitReason.NO_EXECUTOR
            self.queues[model].all_blocked(reason, now)
            return
        self._measure_capacity(model, now, now)

    def more_admit(self, model: str, now: float) -> None:
        """One lane of a model more takes new sequences, or stands by."""
        self._review_spares(model)
        self._measure_capacity(model, self._vacant_since.pop(model, now), now)
        self.queues[model].all_blocked(WaitReason.POLICY, now)

    def came_closed(self, lane: Lane, now: float) -> None:
        """A lane is attached that takes no new sequences yet: how long a model has been vacant does not change."""
        model = lane.model.name
        if model not in self.kv_capacity:
            self.kv_capacity[model] = lane.num_kv_tokens
            self.queues[model].set_room(lane.num_kv_tokens, now)
        self.fewer_admit(model, now)

    def hold_anew(self, lane: Lane, now: float) -> None:
        """Who has been served until now, by this lane, waits for one as long as any, where there is none."""
        model = lane.model.name
        if model in self._vacant_since:
            self._vacant_since[model] = now
        if lane.num_kv_tokens > self.queues[model].room:
            self._shrunk_since[model] = now

    def take_overdue(self, now: float) -> Iterator[tuple[Sequence, str]]:
        """Those that have waited out the hold time, with what to tell them. The caller ends each as it comes."""
        held = f"within {self.config.hold_s:g} s"
        for model in self._due(self._vacant_since, now):
            for sequence in list(self.queues[model]):
                yield sequence, f"no executor served the model {model!r} {held}"
        for model in self._due(self._shrunk_since, now):
            queue = self.queues[model]
            del self._shrunk_since[model]
            self.kv_capacity[model] = min(self.kv_capacity[model], queue.room)
            for sequence in list(queue.beyond):
                yield sequence, f"no executor with room for this request served {model!r} {held}"

    def next_due(self, now: float) -> float | None:
        """When the next hold time is over."""
        since = (*self._vacant_since.values(), *self._shrunk_since.values())
        return min((at + self.config.hold_s for at in since if now < at + self.config.hold_s), default=None)

    def _due(self, since: dict[str, float], now: float) -> list[str]:
        return [model for model, at in since.items() if now >= at + self.config.hold_s]

    def _review_spares(self, model: str) -> None:
        """Spares stand by while another lane of their model takes sequences."""
        lanes = self.lanes_of(model)
        is_served = any(not lane.spare and not lane.draining for lane in lanes)
        for lane in lanes:
            lane.stands_by = lane.spare and not lane.draining and is_served

    def _measure_capacity(self, model: str, since: float, now: float) -> None:
        """Note the largest pool among the lanes that take new sequences. What was accepted, and is larger, waits for a
        lane of its size for the hold time, from `since` on."""
        room = max(lane.num_kv_tokens for lane in self.admitting(model))
        queue = self.queues[model]
        if room >= self.kv_capacity.get(model, 0):
            self.kv_capacity[model] = room
        elif room < queue.room or model not in self._shrunk_since:
            self._shrunk_since[model] = since
        queue.set_room(room, now)
        if room >= self.kv_capacity[model] and not len(queue.beyond):
            self._shrunk_since.pop(model, None)
