"""What executors may bring fits what frontends and operators are told of them: an attach never ends the service."""

from __future__ import annotations

from dataclasses import replace

from common.wire import Limits, Refused, decode, encode
from scheduler_svc.admin.roster import roster
from scheduler_svc.core.attachment import MAX_LANES
from scheduler_svc.offer import Offer
from scheduler_svc.stats import gather
from tests.scheduler.test_membership import Rig, hello


def told(rig: Rig) -> None:
    """All that is told of the executors goes over the wire, and is read there."""
    offer = Offer(rig.scheduler)
    for message in (
        offer.news(0.0),
        gather(rig.scheduler, rig.membership, stopping=False),
        roster(7, rig.scheduler, rig.membership, 0.0),
    ):
        assert message is not None and isinstance(decode(encode(message)), type(message))


def test_a_pool_of_billions_of_tokens() -> None:
    rig = Rig()
    rig.receive(b"p", replace(hello(), limits=Limits(4096, 1 << 20, 0, 8, 64)))
    assert rig.scheduler.availability.kv_capacity == {"m": 1 << 32}
    told(rig)


def test_as_many_executors_as_there_may_be() -> None:
    rig = Rig()
    for i in range(MAX_LANES):
        rig.attach(i.to_bytes(4), name=f"{i:04}" + '"' * 252, incarnation=i.to_bytes(4))
    told(rig)
    rig.receive(b"one more", hello("one more"))
    refused = rig.last(Refused, b"one more")
    assert isinstance(refused, Refused) and refused.retry and "1024 executors" in refused.reason
