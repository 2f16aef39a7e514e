"""How long sequences wait, and for what: two numbers a plan, whatever the length of the queue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from scheduler_svc.core.sequence import Sequence, WaitReason

BEHIND = {
    WaitReason.SEATS: WaitReason.SEATS,
    WaitReason.TOKEN_BUDGET: WaitReason.TOKEN_BUDGET,
    WaitReason.KV_BLOCKS: WaitReason.POLICY,
}
"""What those wait for that stand behind one that waits for this. They may not pass it where it waits for blocks."""


class WaitClock:
    """Time in one queue by reason. Most members share one reason; those that a plan looked at may have their own."""

    def __init__(self, seconds: dict[WaitReason, float]) -> None:
        """`seconds` gathers what all members together have waited, by reason."""
        self._seconds = seconds
        self.shared = WaitReason.NO_EXECUTOR
        """What all wait for that have no reason of their own."""
        self._own: dict[int, tuple[Sequence, WaitReason]] = {}
        """By sequence number."""
        self._totals: dict[WaitReason, float] = dict.fromkeys(WaitReason, 0.0)
        """Seconds in which each reason was the shared one."""
        self._entered: dict[int, dict[WaitReason, float]] = {}
        """Sequence number -> totals when it came."""
        self.now = 0.0
        """Up to when time is counted."""

    def __len__(self) -> int:
        return len(self._entered)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.number in self._entered

    def enter(self, sequence: Sequence, now: float) -> None:
        self.advance(now)
        self._entered[sequence.number] = self._totals.copy()

    def leave(self, sequence: Sequence, now: float) -> None:
        """Add the time of this stay to `sequence.waited`."""
        self.advance(now)
        sequence.waited = self.waited(sequence, now)
        del self._entered[sequence.number]
        self._own.pop(sequence.number, None)

    def waited(self, sequence: Sequence, now: float) -> dict[WaitReason, float]:
        """Seconds that a member has waited, by reason."""
        waited, before = dict(sequence.waited), self._entered[sequence.number]
        for reason, total in self._totals.items():
            if total != before[reason]:
                waited[reason] = waited.get(reason, 0.0) + total - before[reason]
        reason = self.why(sequence)
        waited[reason] = waited.get(reason, 0.0) + max(0.0, now - self.now)
        return {reason: seconds for reason, seconds in waited.items() if seconds > 0}

    def set(self, shared: WaitReason, own: Iterable[tuple[Sequence, WaitReason]], now: float) -> None:
        """What the members wait for from now on."""
        self.advance(now)
        self.shared = shared
        self._own = {sequence.number: (sequence, reason) for sequence, reason in own if reason is not shared}

    def why(self, sequence: Sequence) -> WaitReason:
        own = self._own.get(sequence.number)
        return self.shared if own is None else own[1]

    def by_reason(self) -> Counter[WaitReason]:
        """How many members wait for what."""
        counts = Counter(reason for _, reason in self._own.values())
        counts[self.shared] += len(self._entered) - len(self._own)
        return +counts

    def advance(self, now: float) -> None:
        """Count the time that has passed."""
        passed, self.now = now - self.now, now
        if passed <= 0 or not self._entered:
            return
        self._totals[self.shared] += passed
        self._seconds[self.shared] += passed * (len(self._entered) - len(self._own))
        for sequence, reason in self._own.values():
            waited = sequence.waited
            waited[reason] = waited.get(reason, 0.0) + passed
            waited[self.shared] = waited.get(self.shared, 0.0) - passed
            self._seconds[reason] += passed
