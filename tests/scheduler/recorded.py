"""A world of model executors whose scheduler keeps a plan log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scheduler_svc.core import SchedulerConfig
from scheduler_svc.plan_log import PlanLog, RecordedScheduler
from tests.core.world import World


class RecordedWorld(World):
    """As `World`; `close` ends the log."""

    def __init__(self, folder: Path, *, log: PlanLog | None = None, first_epoch: int = 1, **changes: Any) -> None:
        config = SchedulerConfig(**changes)
        super().__init__(config)
        self.folder = folder
        self.log = log or PlanLog(folder)
        self.scheduler = RecordedScheduler(config, self.log, first_epoch=first_epoch, clock=lambda: self.now)

    def iterate(self) -> bool:
        """Each turn takes ten milliseconds, and so does each iteration."""
        self.now += 0.01
        self.scheduler.expire(self.now)
        if not self.turn():
            return False
        self.now += 0.01
        for lane in self.lanes:
            if lane.epoch in self.out:
                self.deliver(lane)
        return True

    def close(self) -> Path:
        self.log.close()
        return self.folder


def eventful(world: RecordedWorld) -> RecordedWorld:
    """A run with all that can happen: two executors, preemptions, aborts, a refusal, a loss, a drain, a newcomer."""
    world.attach(blocks=24, seats=4)
    world.attach(blocks=16, seats=4, budget=16)
    for i in range(8):
        world.submit(6 + 3 * i, 12, priority=i % 3)
    world.submit(100, 12)
    streams = world.submit(9, 20, n=2, owner=1, logprobs=2, prompt_logprobs=1)
    for _ in range(4):
        world.iterate()
    world.abort(streams[0])
    world.turn()
    world.lose(world.lanes[1], guilty=(0,), reason="it broke")
    for lane in world.lanes:
        if lane.epoch in world.out:
            world.deliver(lane)
    world.abort_owner(1)
    world.iterate()
    world.attach(blocks=64, seats=4)
    world.scheduler.drain(world.lanes[0], world.now)
    world.read_outbox(None)
    for i in range(3):
        world.submit([3, 4, 5, 6, 7, 8, 9, 10, 11 + i], 6)
        world.iterate()
    world.run()
    for i in range(5):
        world.submit(5, 12, priority=9 - 2 * i, ignore_eos=True)
        world.iterate()
    world.run()
    world.check_idle()
    return world
