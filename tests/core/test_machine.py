"""The core under random histories: every step keeps the invariants, every answer is the one of a run alone."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.wire import Constraint, KeyLimits, ModelCard, Retention
from common.wire.constraint import UNBOUND
from scheduler_svc.core import AttachError, Lane, LaneError, SchedulerConfig
from scheduler_svc.core.config import (
    Admission,
    Batching,
    Discipline,
    Eviction,
    Handover,
    KvLayout,
    Preemption,
    Prefill,
)
from tests.core.model_executor import card
from tests.core.nonsense import SPOILS, snapshot, spoil
from tests.core.stream import Stream
from tests.core.totals import totals
from tests.core.world import World

DEBUG = os.environ.get("HYPOTHESIS_PROFILE") == "debug"
NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
BASES = [[2 + (i * step + i // 5) % 38 for i in range(40)] for step in (3, 7)]
"""Prompts are beginnings of these, so that prefixes are shared."""
MODELS = {"m": card(b"weights", name="m"), "n": card(b"others", name="n", max_len=30)}
Pool = tuple[int, int, int]

configs = st.builds(
    SchedulerConfig,
    max_num_seqs=st.sampled_from([3, 6, 20, 1, 2]),
    max_num_batched_tokens=st.sampled_from([64, 16, 8, 1, 3]),
    batching=st.sampled_from(Batching),
    prefill=st.sampled_from(Prefill),
    chunked_prefill=st.sampled_from([True, False]),
    kv=st.sampled_from(KvLayout),
    preemption=st.sampled_from(Preemption),
    handover=st.sampled_from(Handover),
    eviction=st.sampled_from(Eviction),
    discipline=st.sampled_from(Discipline),
    admission=st.sampled_from([Admission.IMMEDIATE, Admission.PREDICTED, Admission.WORST_CASE]),
    target_itl_ms=st.sampled_from([0.0, 0.0, 50.0]),
    isolate_tenants=st.booleans(),
    ageing_s=st.sampled_from([1.0, 0.0, 30.0]),
    tenant_weights=st.sampled_from([{}, {"a": 3.0}]),
    max_prefill_chunk=st.sampled_from([0, 0, 0, 5, 1]),
    long_prefill_threshold=st.sampled_from([0, 0, 6, 1000]),
    watermark=st.sampled_from([0.01, 0.0, 0.2]),
    prefix_caching=st.sampled_from([True, True, True, False]),
    max_waiting=st.sampled_from([100, 100, 100, 6]),
    hold_s=st.just(5.0),
    max_strikes=st.sampled_from([4, 2]),
)
pools = st.tuples(
    st.sampled_from([2, 4, 1, 8]), st.sampled_from([32, 24, 60, 12, 200]), st.sampled_from([0, 8, 30])
).map(lambda pool: (pool[0], -(-pool[1] // pool[0]), -(-pool[2] // pool[0])))
"""Block size, number of blocks on the device, and on the host."""
requests = st.fixed_dictionaries(
    {
        "prompt": st.builds(
            lambda base, length, tail: base[:length] + tail,
            st.sampled_from(BASES),
            st.sampled_from([1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 24, 33]),
            st.sampled_from([[], [], [5], [9, 9]]),
        ),
        "max_tokens": st.sampled_from([1, 2, 5, 9, 14]),
        "n": st.sampled_from([1, 1, 1, 2, 4]),
        "owner": st.integers(0, 1),
        "priority": st.sampled_from([0, 0, 0, -1, 2]),
        "logprobs": st.sampled_from([-1, -1, 0, 2]),
        "prompt_logprobs": st.sampled_from([-1, -1, -1, -1, -1, 1]),
        "temperature": st.sampled_from([0.0, 1.0]),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.sampled_from([[], [7, 30]]),
        "model": st.sampled_from(["m"] * 9 + ["n"]),
        "tenant": st.sampled_from(["", "a", "b"]),
        "salt": st.sampled_from([b"", b"", b"s"]),
        "retention": st.sampled_from([*Retention]),
        "deadline_ms": st.sampled_from([0, 500, 3000]),
        "constraint": st.sampled_from([UNBOUND, UNBOUND, Constraint(allowed_ids=np.array([2], np.int32))]),
        "limits": st.sampled_from([None, None, None, KeyLimits("a", 2), KeyLimits("b", 5, 6000)]),
    }
)


class CalmMachine(RuleBasedStateMachine):
    """Clients come and go; results come late; the lanes stay."""

    @initialize(config=configs, pool=pools, peers=st.lists(pools, max_size=1))
    def start(self, config: SchedulerConfig, pool: Pool, peers: list[Pool]) -> None:
        self.world = World(config)
        self.fingerprints = dict.fromkeys(MODELS, 0)
        for _, blocks, host_blocks in [pool, *peers]:
            self.world.attach(blocks, pool[0], model=self.model("m"), host_blocks=host_blocks, transfer=True)

    # --- clients ---

    @rule(burst=st.lists(requests, min_size=1, max_size=5))
    def submit(self, burst: list[dict[str, Any]]) -> None:
        for request in burst:
            self.world.submit(**request)

    @precondition(lambda self: self.world.streams)
    @rule(data=st.data())
    def abort_any(self, data: st.DataObject) -> None:
        """Live, ended and aborted ones alike."""
        self.world.abort(data.draw(st.sampled_from(list(self.world.streams.values()))))

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def abort_live(self, data: st.DataObject) -> None:
        self.world.abort(data.draw(st.sampled_from(self.live())))

    @rule(owner=st.integers(0, 3), number=st.integers(1000, 1002))
    def abort_unknown(self, owner: int, number: int) -> None:
        self.world.scheduler.abort(owner, [number], self.world.now)

    # --- iterations ---

    @rule()
    def turn(self) -> None:
        self.world.turn()

    @rule(count=st.sampled_from([1, 2, 4, 12]))
    def iterate(self, count: int) -> None:
        for _ in range(count):
            self.world.now += 0.01
            self.world.turn()
            for lane in self.flying():
                self.world.deliver(lane)
            self.world.check()

    @precondition(lambda self: self.world.out)
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        self.world.deliver(data.draw(st.sampled_from(self.flying())))

    @precondition(lambda self: self.world.fetches.pending)
    @rule(data=st.data(), count=st.sampled_from([1, 1000]), fail=st.booleans())
    def fetch(self, data: st.DataObject, count: int, fail: bool) -> None:
        """KV of a hand-over comes, or does not."""
        self.world.fetches.come(data.draw(st.sampled_from(sorted(self.world.fetches.pending))), count, fail=fail)

    # --- help ---

    def live(self) -> list[Stream]:
        return [s for s in self.world.streams.values() if s.accepted and not s.over]

    def flying(self) -> list[Lane]:
        return [lane for lane in self.world.lanes if lane.epoch in self.world.out]

    def model(self, name: str) -> ModelCard:
        return replace(MODELS[name], fingerprint=MODELS[name].fingerprint + bytes([self.fingerprints[name]]))

    @invariant()
    def check(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        """Whatever has happened, all that was accepted ends when there is an executor."""
        if not hasattr(self, "world"):
            return
        world = self.world
        for lane in self.flying():
            world.deliver(lane)
        for name in MODELS:
            lanes = world.scheduler.availability.lanes_of(name)
            if not any(lane.admits for lane in lanes):
                model, size = (lanes[0].model, lanes[0].block_size) if lanes else (self.model(name), 4)
                world.attach(200, size, 8, 64, model)
            elif len(world.scheduler.queues[name].beyond):
                world.attach(200, lanes[0].block_size, 8, 64, lanes[0].model)
        preemptions, live = totals(world.scheduler).preemptions, len(world.scheduler.live)
        world.run(5000)
        world.check_idle()
        assert totals(world.scheduler).preemptions - preemptions <= live * (live + 1), "preemption in turn"


class StormyMachine(CalmMachine):
    """As before, and executors attach, answer nonsense, die, drain and are swapped; frontends die; time passes."""

    @rule(owner=st.integers(0, 2))
    def lose_frontend(self, owner: int) -> None:
        self.world.abort_owner(owner)

    @precondition(lambda self: self.world.out)
    @rule(data=st.data(), kind=st.sampled_from(SPOILS))
    def answer_nonsense(self, data: st.DataObject, kind: str) -> None:
        """A result that cannot follow from the plan is refused and changes nothing; the lane must go."""
        lane = data.draw(st.sampled_from(self.flying()))
        result = spoil(lane, self.world.out[lane.epoch].result, kind)
        if result is None:
            return
        before = snapshot(lane)
        with pytest.raises(LaneError):
            self.world.scheduler.apply(lane, result, self.world.now)
        assert snapshot(lane) == before and not self.world.scheduler.outbox
        self.world.check()
        self.world.lose(lane)

    @precondition(lambda self: len(self.world.lanes) < 3)
    @rule(
        pool=pools,
        seats=st.sampled_from([8, 1, 2]),
        budget=st.sampled_from([64, 2, 16]),
        name=st.sampled_from("mmn"),
        transfer=st.sampled_from([True, True, False]),
        spare=st.sampled_from([False, False, True]),
    )
    def attach(self, pool: Pool, seats: int, budget: int, name: str, transfer: bool, spare: bool) -> None:
        lanes = self.world.scheduler.availability.lanes_of(name)
        block_size = lanes[0].block_size if lanes else pool[0]
        self.world.attach(pool[1], block_size, seats, budget, self.model(name), pool[2], transfer, spare)

    @precondition(lambda self: self.world.lanes)
    @rule(data=st.data())
    def attach_another_model(self, data: st.DataObject) -> None:
        """Other weights or blocks under the name of a model that is served are refused."""
        lane = data.draw(st.sampled_from(self.world.lanes))
        before = dict(self.world.scheduler.lanes)
        with pytest.raises(AttachError, match=r"fingerprint"):
            self.world.attach(9, lane.block_size, model=replace(lane.model, fingerprint=b"strange"))
        with pytest.raises(AttachError, match=r"block_size"):
            self.world.attach(9, lane.block_size + 1, model=lane.model)
        assert self.world.scheduler.lanes == before

    @precondition(lambda self: self.world.lanes)
    @rule(data=st.data(), blame=st.sampled_from(["nobody", "nobody", "one", "wild"]), swap=st.booleans())
    def lose(self, data: st.DataObject, blame: str, swap: bool) -> None:
        lane = data.draw(st.sampled_from(self.world.lanes))
        guilty: tuple[int, ...] = ()
        if blame == "one" and lane.epoch in self.world.out:
            plan = self.world.out[lane.epoch].plan
            guilty = (int([*plan.decodes, *plan.prefills][0]),)
        elif blame == "wild":
            guilty = (0, 65_535)
        if swap and len(self.world.scheduler.availability.lanes_of(lane.model.name)) == 1:
            self.fingerprints[lane.model.name] += 1
        self.world.lose(lane, guilty)

    @precondition(lambda self: self.world.lanes)
    @rule(data=st.data())
    def drain(self, data: st.DataObject) -> None:
        self.world.drain(data.draw(st.sampled_from(self.world.lanes)))

    @precondition(lambda self: self.world.lanes)
    @rule(data=st.data(), verb=st.sampled_from(["pause", "pause", "resume", "vacate"]))
    def steer(self, data: st.DataObject, verb: str) -> None:
        """An operator pauses, resumes or empties any lane, also one for which it means nothing."""
        lane = data.draw(st.sampled_from(self.world.lanes))
        match verb:
            case "pause":
                self.world.pause(lane)
            case "resume":
                self.world.resume(lane)
            case _:
                self.world.scheduler.vacate(lane, self.world.now)

    @rule(seconds=st.sampled_from([0.1, 1.0, 4.0, 6.0]))
    def wait(self, seconds: float) -> None:
        self.world.now += seconds
        self.world.scheduler.expire(self.world.now)
        self.world.read_outbox(None)


TestCalm = CalmMachine.TestCase
TestStormy = StormyMachine.TestCase
TestCalm.settings = TestStormy.settings = settings(
    max_examples=20_000 if NIGHTLY else 20,
    stateful_step_count=80 if NIGHTLY else 40,
    deadline=None,
    phases=[Phase.generate] if DEBUG else list(Phase),
)
