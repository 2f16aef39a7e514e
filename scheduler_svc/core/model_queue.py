"""The waiting sequences of one model: their order, how it changes as time passes, and what they wait for."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterator

from scheduler_svc.core.config import Discipline, SchedulerConfig
from scheduler_svc.core.counters import Counters, ModelCounters
from scheduler_svc.core.fair import FairQueue, FairShare
from scheduler_svc.core.prediction import OutputLengths
from scheduler_svc.core.sequence import Key, Sequence, WaitReason
from scheduler_svc.core.wait_clock import BEHIND, WaitClock
from scheduler_svc.core.waiting_queue import Line, WaitingQueue

LATE = 1e9
"""Added to the deadlines of those that will miss theirs: they come after all others of their rank."""


MAX_DUE = 512
"""Timers seen to in one plan; when more are due at once, the next plans see to the others."""


class ModelQueue:
    """Long prompts stand apart, so that short ones can pass a long prefill; so does what no lane can hold now."""

    def __init__(self, config: SchedulerConfig, counters: Counters) -> None:
        self._config = config
        self.counters = ModelCounters()
        self.share: FairShare | None = None
        """Counters of the tenants, under `fair`."""
        if config.discipline is Discipline.FAIR:
            self.share = FairShare(config.tenant_weights, config.output_token_weight)
        self.long_threshold = 0
        """Sequences that enter with more tokens are long."""
        self.room = 0
        """Tokens of KV in the largest pool of the lanes that take sequences, or that did last."""
        self.short, self.long, self.beyond = self._line(), self._line(), self._line()
        """`beyond`: those that need more than the room. They wait for a larger lane, in nobody's way."""
        self._clock, self._beyond_clock = WaitClock(counters.waited_s), WaitClock(counters.waited_s)
        """The latter for those beyond: what they wait for is not noted at each plan."""
        self.lengths = OutputLengths()
        """What the model's answers taught."""
        self.token_s = 0.0
        """Smoothed seconds from one token of a running sequence to its next."""
        self.num_new = 0
        """Those among the members that never ran."""
        self.num_new_tokens = 0
        """Tokens of their prompts."""
        self.last_ticket = 0
        self._timers: list[tuple[float, int, bool, Sequence]] = []
        """A heap of (when, ticket, whether its deadline is out of reach then, sequence): its key changes then, if it
        still has that ticket and waits."""
        self._classes: Counter[int] = Counter()
        """Priority classes of the live sequences, as asked for."""
        self._ageing = 0.0 if config.discipline is Discipline.FCFS else config.ageing_s

    def _line(self) -> Line:
        return WaitingQueue() if self.share is None else FairQueue(self.share)

    def __len__(self) -> int:
        return self.num_within + len(self.beyond)

    @property
    def num_within(self) -> int:
        """Members that a lane can hold."""
        return len(self.short) + len(self.long)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.short
        yield from self.long
        yield from self.beyond

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._part(sequence)

    # --- membership ---

    def begin(self, sequence: Sequence) -> None:
        """A sequence came to life."""
        self._classes[sequence.priority] += 1
        if self.share is not None:
            self.share.begin(sequence.tenant)

    def end(self, sequence: Sequence) -> None:
        """A sequence has ended."""
        self._classes[sequence.priority] -= 1
        if not self._classes[sequence.priority]:
            del self._classes[sequence.priority]
        if self.share is not None:
            self.share.end(sequence.tenant)

    def add(self, sequence: Sequence, now: float) -> None:
        """A sequence begins to wait, or waits again."""
        self.last_ticket += 1
        sequence.ticket = self.last_ticket
        sequence.is_long = len(sequence.tokens) > self.long_threshold
        sequence.key = self._key(sequence, now)
        self._clock_of(sequence).enter(sequence, now)
        if self.share is not None:
            self.share.enter(sequence.tenant)
        if self._ageing:
            # What it has waited before counts: who is preempted again and again must rise too.
            due = now + self._ageing - sum(sequence.waited.values()) % self._ageing
            heapq.heappush(self._timers, (due, sequence.ticket, False, sequence))
            self._compact()
        if self._config.discipline is Discipline.DEADLINE:
            self._watch_deadline(sequence, now)
        self.put_back(sequence)

    def remove(self, sequence: Sequence, now: float) -> None:
        """A member waits no more."""
        self.set_aside(sequence)
        self._clock_of(sequence).leave(sequence, now)
        if self.share is not None:
            self.share.leave(sequence.tenant)

    def set_aside(self, sequence: Sequence) -> None:
        """Take a member out of its line for a moment, to see those behind it; it still waits."""
        self._count_new(sequence, -1)
        self._part(sequence).remove(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """Return a member that was set aside."""
        self._count_new(sequence, 1)
        self._part(sequence).add(sequence)

    def set_room(self, room: int, now: float) -> None:
        """The largest pool is another now: who is beyond it stands apart."""
        moving = [s for s in self if (s.max_length - 1 > self.room) != (s.max_length - 1 > room)]
        for sequence in moving:
            self._part(sequence).remove(sequence)
            self._clock_of(sequence).leave(sequence, now)
        self.room = room
        for sequence in moving:
            self._part(sequence).add(sequence)
            self._clock_of(sequence).enter(sequence, now)

    def _count_new(self, sequence: Sequence, sign: int) -> None:
        if sequence.admitted < 0:
            self.num_new += sign
            self.num_new_tokens += sign * sequence.prompt_length

    def head(self, *, long_above: int | None = None) -> Sequence | None:
        """The next sequence by key; with `long_above`, of the long ones only one of a rank above that."""
        short, long = self.short.head(), self.long.head()
        if long is not None and long_above is not None and long.rank >= long_above:
            long = None
        if short is None or long is None:
            return short or long
        return min(short, long, key=lambda sequence: sequence.key)

    def _is_beyond(self, sequence: Sequence) -> bool:
        return sequence.max_length - 1 > self.room

    def _part(self, sequence: Sequence) -> Line:
        if self._is_beyond(sequence):
            return self.beyond
        return self.long if sequence.is_long else self.short

    # --- order ---

    def _key(self, sequence: Sequence, now: float) -> Key:
        order = 0.0
        if self._config.discipline is Discipline.DEADLINE:
            until = sequence.deadline + (self._ageing or math.inf)
            order = sequence.deadline + (LATE if self._latest_start(sequence) <= now < until else 0.0)
        elif self.share is not None:
            order = self.share.counter(sequence.tenant)
        return (sequence.rank, order, sequence.number)

    def _latest_start(self, sequence: Sequence) -> float:
        """When a sequence must run to meet its deadline, by the usual length of answers and time of a token."""
        generated = len(sequence.tokens) - sequence.prompt_length
        predicted = self.lengths.predict(sequence.tenant, generated, sequence.params.max_tokens)
        return sequence.deadline - (predicted - generated) * self.token_s

    def _watch_deadline(self, sequence: Sequence, now: float) -> None:
        """Set a timer for when its deadline is out of reach, then for when it has passed by the time of ageing."""
        for due in (self._latest_start(sequence), sequence.deadline + self._ageing):
            if now < due:
                heapq.heappush(self._timers, (due, sequence.ticket, True, sequence))
                return

    def refresh(self, now: float) -> None:
        """Lift those that have waited long, and demote those that are late, for a while."""
        due: list[tuple[int, bool, Sequence]] = []
        while self._timers and self._timers[0][0] <= now and len(due) < MAX_DUE:
            due.append(heapq.heappop(self._timers)[1:])
        best = min(self._classes, default=0)
        for ticket, is_deadline, sequence in due:
            if sequence.ticket != ticket or sequence not in self:
                continue
            if is_deadline:
                self._watch_deadline(sequence, now)
            else:
                heapq.heappush(self._timers, (now + self._ageing, ticket, False, sequence))
                if sequence.rank <= best:
                    continue
                sequence.rank -= 1
            sequence.key = self._key(sequence, now)
            self._part(sequence).add(sequence)

    def _compact(self) -> None:
        """Forget the timers of those that have left, when they are many."""
        if len(self._timers) > 64 and len(self._timers) > 4 * (len(self._clock) + len(self._beyond_clock)):
            self._timers = [
                (due, ticket, is_deadline, sequence)
                for due, ticket, is_deadline, sequence in self._timers
                if sequence in self._clock_of(sequence) and sequence.ticket == ticket
            ]
            heapq.heapify(self._timers)

    # --- reasons ---

    def blocked(self, head: Sequence | None, reason: WaitReason, aside: list[Sequence], now: float) -> None:
        """Note what a plan found: what stopped the admission of the head, and whom it had set aside by policy."""
        own = [(sequence, WaitReason.POLICY) for sequence in aside]
        if head is not None:
            own.append((head, reason))
        self._clock.set(BEHIND.get(reason, WaitReason.POLICY), own, now)
        self._beyond_clock.set(WaitReason.POLICY, [], now)

    def all_blocked(self, reason: WaitReason, now: float) -> None:
        """All members wait for the same thing."""
        for clock in (self._clock, self._beyond_clock):
            clock.set(reason, [], now)

    def why(self, sequence: Sequence) -> WaitReason:
        """What a member waits for."""
        return self._clock_of(sequence).why(sequence)

    def waited(self, sequence: Sequence, now: float) -> dict[WaitReason, float]:
        """Seconds that a member has waited, by reason."""
        return self._clock_of(sequence).waited(sequence, now)

    def by_reason(self) -> Counter[WaitReason]:
        """How many members wait for what."""
        return self._clock.by_reason() + self._beyond_clock.by_reason()

    def advance(self, now: float) -> None:
        """Count the time that has passed."""
        for clock in (self._clock, self._beyond_clock):
            clock.advance(now)

    def _clock_of(self, sequence: Sequence) -> WaitClock:
        return self._beyond_clock if self._is_beyond(sequence) else self._clock
