"""The models go to the frontends when they have changed, and only then."""

from __future__ import annotations

from dataclasses import replace

from common.wire import Serving
from scheduler_svc.offer import Offer
from tests.scheduler.test_membership import LIMITS, Rig, hello


def names(serving: Serving | None) -> list[str] | None:
    return None if serving is None else [card.name for card in serving.models]


def test_only_changes_are_told() -> None:
    rig = Rig()
    scheduler, offer = rig.scheduler, Offer(rig.scheduler)
    assert offer.news(0.0) is None
    rig.attach()
    assert names(offer.news(0.0)) == ["m"]
    rig.attach(b"q", name="two", incarnation=b"j")
    one, two = scheduler.lanes.values()
    for change in (scheduler.pause, scheduler.resume):
        change(one, 0.0)
        assert offer.news(0.0) is None
    scheduler.detach(two, 0.0, reason="lost")
    assert offer.news(0.0) is None, "the card of the one that is left is alike"
    larger = replace(hello("three", incarnation=b"k"), limits=replace(LIMITS, num_blocks=128))
    rig.receive(b"r", larger)
    news = offer.news(0.0)
    assert news is not None and news.kv_capacity == (512,)
    scheduler.pause(one, 1.0)
    scheduler.pause(list(scheduler.lanes.values())[-1], 1.0)
    assert offer.news(5.9) is None and names(offer.told) == ["m"]
    assert names(offer.news(6.1)) == [], "the hold time is over"


def test_another_card_under_the_same_name_is_told() -> None:
    rig = Rig()
    offer = Offer(rig.scheduler)
    rig.attach()
    offer.news(0.0)
    rig.membership.lose(rig.membership.executors[0], 0.0, "lost")
    rig.attach(b"q", incarnation=b"j", weights=b"x")
    news = offer.news(0.0)
    assert news is not None and news.models[0].fingerprint == b"x" and offer.news(0.0) is None
