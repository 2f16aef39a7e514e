"""An executor that comes for another, or is refused: what waits for it goes on with it, or ends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.wire import EndReason, Limits, ModelCard
from scheduler_svc.core import AttachError, Lane, WaitReason
from tests.core.model_executor import card
from tests.core.stream import reason, whole
from tests.core.world import World


def test_waiting_requests_go_on_with_a_replaced_model_but_a_begun_answer_ends() -> None:
    world = World()
    lane = world.attach(seats=1)
    (begun,), (fresh,) = world.submit(5, 9, ignore_eos=True), world.submit(6, 4)
    world.iterate()
    world.lose(lane)
    world.attach(model=card(b"new weights"))
    assert reason(begun) is EndReason.FAILED
    world.run()
    assert whole(fresh) and fresh.model == card(b"new weights")


@pytest.mark.parametrize("smaller", [{"max_len": 8}, {"vocab_size": 5}])
def test_a_replacement_that_cannot_hold_a_request_ends_it(smaller: dict[str, int]) -> None:
    world = World()
    lane = world.attach()
    (stream,) = world.submit([2, 30, 3, 4, 5], 9)
    world.lose(lane)
    world.attach(model=card(b"smaller", **smaller))
    assert reason(stream) is EndReason.FAILED
    world.check_idle()


def test_requests_wait_for_an_executor_as_long_as_the_hold_time() -> None:
    world = World(hold_s=10.0)
    (unknown,) = world.submit(5, 3)
    assert reason(unknown) is EndReason.NO_EXECUTOR, "nobody ever served this model"
    lane = world.attach()
    (early,) = world.submit(5, 3)
    world.lose(lane)
    assert world.scheduler.expire(world.now + 9.9) == world.now + 10.0
    world.now += 9.9
    (late,) = world.submit(5, 3)
    assert world.scheduler.why(world.sequence(late)) is WaitReason.NO_EXECUTOR
    assert not early.over and not late.over
    world.now += 0.2
    assert world.scheduler.expire(world.now) is None
    world.read_outbox(None)
    assert reason(early) is reason(late) is EndReason.NO_EXECUTOR
    (refused,) = world.submit(5, 3)
    assert reason(refused) is EndReason.NO_EXECUTOR
    world.attach()
    assert world.scheduler.expire(world.now) is None
    (served,) = world.submit(5, 3)
    world.run()
    assert whole(served)


@pytest.mark.parametrize(
    ("model", "block_size", "field"),
    [
        (card(b"strange"), 4, "fingerprint"),
        (card(vocab_size=41), 4, "vocab_size"),
        (card(max_len=49), 4, "max_model_len"),
        (replace(card(), eos_ids=(1, 2)), 4, "eos_ids"),
        (replace(card(), chat_template="x"), 4, "template"),
        (replace(card(), tokenizer_files={"tokenizer.json": b"x"}), 4, "tokenizer"),
        (replace(card(), default_params={"top_p": 0.5}), 4, "sampling default"),
        (card(), 8, "block_size"),
    ],
)
def test_an_executor_that_would_answer_otherwise_is_refused(model: ModelCard, block_size: int, field: str) -> None:
    world = World()
    world.attach()
    with pytest.raises(AttachError, match=field):
        world.attach(block_size=block_size, model=model)
    assert len(world.lanes) == 1
    world.attach(blocks=9, seats=3, budget=7)
    assert [lane.epoch for lane in world.lanes] == [1, 2], "a refusal costs no epoch"


def test_limits_that_no_memory_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object) -> Lane:
        raise MemoryError

    monkeypatch.setattr("scheduler_svc.core.scheduler.Lane", no_memory)
    world = World()
    with pytest.raises(AttachError, match="no memory"):
        world.scheduler.attach("e", card(), Limits(4, 64, 0, 65_535, 64), world.now)
    assert not world.lanes and not world.scheduler.queues
