"""A world of model executors whose scheduler keeps a plan log."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from common.wire import KeyLimits, Retention
from scheduler_svc.core import Lane, SchedulerConfig
from scheduler_svc.plan_log import PlanLog, RecordedScheduler
from tests.core.world import World


class RecordedWorld(World):
    """As `World`; `close` ends the log."""

    def __init__(
        self,
        folder: Path,
        config: SchedulerConfig | None = None,
        *,
        log: PlanLog | None = None,
        first_epoch: int = 1,
        **changes: Any,
    ) -> None:
        config = config or SchedulerConfig(**changes)
        super().__init__(config)
        self.folder = folder
        self.log = log or PlanLog(folder, max_segments=100)
        self.scheduler = RecordedScheduler(config, self.log, first_epoch=first_epoch, clock=lambda: self.now)

    def begin_segment(self) -> None:
        assert isinstance(self.scheduler, RecordedScheduler)
        self.scheduler.begin_segment()

    def _check_lane_is_full(self, lane: Lane) -> None:
        """Not here: it asks for prefix hits, which fills a cache without a verb."""

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
        self.fetches.finish()
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
    world.drain(world.lanes[0])
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


KEYS = KeyLimits("few", max_concurrent=4), KeyLimits("slow", tokens_per_minute=600), KeyLimits("both", 9, 3000)

STEPS = {"submit": 4, "turn": 6, "deliver": 6, "abort": 1, "lose": 0.2, "drain": 0.1, "leave": 0.1, "fetch": 2}
STEPS |= {"pause": 0.1, "resume": 0.2, "vacate": 0.1}
"""What may happen, and how often."""


def wander(world: RecordedWorld, seed: int, num_steps: int, *, segment_every: int = 0) -> RecordedWorld:
    """Clients and executors come and go at random; every so many steps a segment of the log begins."""
    draw = random.Random(seed)
    for step in range(num_steps):
        if segment_every and step % segment_every == segment_every - 1:
            world.begin_segment()
        world.now += draw.choice([0.0, 0.001, 0.02, 0.7])
        if len(world.lanes) < 2 or draw.random() < 0.02:
            blocks, seats, spare = draw.choice([16, 24, 60]), draw.choice([3, 8]), draw.random() < 0.2
            world.attach(blocks, seats=seats, budget=64, host_blocks=20, transfer=True, spare=spare)
        what = draw.choices([*STEPS], [*STEPS.values()])
        match what[0]:
            case "submit":
                submit_any(world, draw)
            case "turn":
                world.scheduler.expire(world.now)
                world.turn()
            case "deliver" if world.out:
                epoch = draw.choice(list(world.out))
                world.deliver(world.scheduler.lanes[epoch])
            case "abort" if world.streams:
                world.abort(draw.choice(list(world.streams.values())))
            case "lose" if world.lanes:
                world.lose(draw.choice(world.lanes), guilty=(0,) if draw.random() < 0.3 else ())
            case "drain" if world.lanes:
                world.drain(draw.choice(world.lanes))
            case "fetch" if world.fetches.pending:
                ticket, count = draw.choice(sorted(world.fetches.pending)), draw.choice([1, 100])
                world.fetches.come(ticket, count, fail=draw.random() < 0.2)
            case "leave" if world.lanes:
                world.leave(draw.choice(world.lanes))
            case "pause" if world.lanes:
                world.pause(draw.choice(world.lanes))
            case "resume" if world.lanes:
                world.resume(draw.choice(world.lanes))
            case "vacate" if world.lanes:
                world.scheduler.vacate(draw.choice(world.lanes), world.now)
        world.read_outbox(None)
    return world


def submit_any(world: RecordedWorld, draw: random.Random) -> None:
    base = draw.choice([3, 7])
    world.submit(
        [2 + (i * base + i // 5) % 38 for i in range(draw.choice([1, 4, 9, 16, 24]))] + draw.choice([[], [5]]),
        draw.choice([1, 5, 14]),
        n=draw.choice([1, 1, 3]),
        owner=draw.randrange(2),
        priority=draw.choice([0, 0, -1, 2]),
        tenant=draw.choice(["", "a", "b"]),
        salt=draw.choice([b"", b"s"]),
        retention=draw.choice(list(Retention)),
        deadline_ms=draw.choice([0, 500, 3000]),
        timeout_ms=draw.choice([0, 0, 0, 0, 0, 0, 0, 3000]),
        temperature=draw.choice([0.0, 1.0]),
        logprobs=draw.choice([-1, 1]),
        stop_token_ids=draw.choice([[], [7, 30]]),
        limits=draw.choice([None, None, None, *KEYS]),
    )
