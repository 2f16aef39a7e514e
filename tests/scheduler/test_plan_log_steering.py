"""What operators do to lanes, and spares, are in the plan log: a steered run plays again to the same plans."""

from __future__ import annotations

from pathlib import Path

from common.wire import encode
from scheduler_svc.plan_log.format import Kind
from scheduler_svc.plan_log.player import Player
from tests.core.stream import whole
from tests.scheduler.recorded import RecordedWorld


def test_a_steered_run_plays_again_from_each_of_its_segments(tmp_path: Path) -> None:
    world = RecordedWorld(tmp_path)
    main, spare = world.attach(), world.attach(seats=2, spare=True)
    streams = [world.submit(6 + i, 12, ignore_eos=True)[0] for i in range(4)]
    world.iterate()
    world.pause(main)
    world.begin_segment()
    world.iterate()
    assert (main.num_running, spare.num_running) == (2, 2)
    world.scheduler.vacate(main, world.now)
    world.begin_segment()
    world.iterate()
    assert not main.num_running
    world.begin_segment()
    world.resume(main)
    world.run()
    assert whole(*streams)
    player = Player(world.close())
    kinds = [step.kind for step in player.steps()]
    assert [kinds.count(kind) for kind in (Kind.PAUSE, Kind.VACATE, Kind.RESUME)] == [1, 1, 1]
    assert player.num_iterations == len(world.plans)
    alone = [step.plan for segment in player.segments for step in Player(segment.path).steps()]
    assert [encode(plan) for plan in alone if plan is not None] == [encode(plan) for plan in world.plans]
