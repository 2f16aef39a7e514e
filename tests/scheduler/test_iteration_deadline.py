"""An executor that hangs is lost at the deadline that its iterations have taught; log and metric say which."""

from __future__ import annotations

import re

import pytest

from common.wire import Alive, Reset
from scheduler_svc.core.pacing import MIN_OBSERVED, SOURCES
from scheduler_svc.membership import Membership
from scheduler_svc.stats import gather
from tests.scheduler.test_membership import Rig, result

OVERDUE = 'gilir_iterations_overdue{deadline="%s"}'
DEADLINE = 'gilir_iteration_deadline_seconds{model_name="m",engine="one"}'


class SlowRig(Rig):
    """Iterations take as long as they are told to; the heartbeat goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.membership = Membership(
            self.scheduler,
            self._send,
            heartbeat_ms=100,
            heartbeat_timeout_s=1.0,
            iteration_timeout_s=60.0,
            iteration_floor_s=4.0,
        )
        self.now = 0.0
        self.epoch = self.attach()

    def wait(self, seconds: float) -> bool:
        """Let time pass, with signs of life. Returns whether the executor is still attached after it."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + 0.5)
            self.receive(b"pulse", Alive(self.epoch), self.now)
            self.membership.check(self.now)
        return bool(self.scheduler.lanes)

    def iterate(self, seconds: float) -> None:
        plan = self.plan(self.now)
        assert self.wait(seconds)
        self.receive(b"p", result(plan, 7), self.now)


@pytest.mark.parametrize(
    ("usual_s", "deadline_s", "source"), [(0.01, 4.0, "floor"), (0.5, 10.0, "learned"), (3.5, 60.0, "limit")]
)
def test_a_hang_is_noticed_at_the_deadline(usual_s: float, deadline_s: float, source: str) -> None:
    rig = SlowRig()
    stream = rig.submit(max_tokens=40)
    for _ in range(MIN_OBSERVED + 2):
        rig.iterate(usual_s)
    rig.plan(rig.now)
    stats = gather(rig.scheduler, rig.membership, stopping=False)
    assert stats.gauges[DEADLINE] == pytest.approx(deadline_s)
    assert rig.wait(deadline_s) and not rig.wait(0.5)
    stats = gather(rig.scheduler, rig.membership, stopping=False)
    overdue = {name: stats.counters[OVERDUE % name] for name in SOURCES}
    assert overdue == dict.fromkeys(SOURCES, 0) | {source: 1}
    reset = rig.last(Reset, b"p")
    assert isinstance(reset, Reset) and re.fullmatch(rf"no result within \d+ s \(deadline: {source}\)", reset.reason)
    assert rig.ended() == [] and len(rig.streamed(stream)) == MIN_OBSERVED + 2


def test_a_new_epoch_learns_anew() -> None:
    rig = SlowRig()
    rig.submit(max_tokens=40)
    for _ in range(MIN_OBSERVED + 2):
        rig.iterate(0.01)
    rig.plan(rig.now)
    assert not rig.wait(4.5)
    rig.epoch = rig.attach()
    rig.receive(b"pulse", Alive(rig.epoch), rig.now)
    rig.plan(rig.now)
    assert rig.wait(59.0), "nothing is learned of this attachment"
