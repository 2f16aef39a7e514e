"""Random histories of a scheduler with one combination of choices: cheap, long, and the same again from its seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest

from common.wire import Constraint, ModelCard, Retention
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
from tests.core.world import World

BASES = [[2 + (i * step + i // 5) % 38 for i in range(40)] for step in (3, 7)]
"""Prompts are beginnings of these, so that prefixes are shared."""
MODELS = {"m": card(b"weights", name="m"), "n": card(b"others", name="n", max_len=30)}
MAX_LANES = 3


class Combination(NamedTuple):
    """A value for each choice that there is. Its text names it, and makes it again."""

    batching: Batching
    prefill: Prefill
    chunking: str
    kv: KvLayout
    preemption: Preemption
    eviction: Eviction
    discipline: Discipline
    admission: Admission

    def __str__(self) -> str:
        return "-".join(self)

    @classmethod
    def parse(cls, text: str) -> Combination:
        batching, prefill, chunking, kv, preemption, eviction, discipline, admission = text.split("-")
        return cls(
            Batching(batching),
            Prefill(prefill),
            chunking,
            KvLayout(kv),
            Preemption(preemption),
            Eviction(eviction),
            Discipline(discipline),
            Admission(admission),
        )


AXES: tuple[tuple[str, ...], ...] = (
    tuple(Batching),
    tuple(Prefill),
    ("chunked", "whole"),
    tuple(KvLayout),
    tuple(Preemption),
    tuple(Eviction),
    tuple(Discipline),
    tuple(Admission),
)


def draw_config(combination: Combination, chance: random.Random) -> SchedulerConfig:
    """The combination, with limits and the choices beside it drawn at random."""
    pick = chance.choice
    return SchedulerConfig(
        max_num_seqs=pick([1, 2, 3, 6, 20]),
        max_num_batched_tokens=pick([1, 3, 8, 16, 16, 64, 64]),
        batching=combination.batching,
        prefill=combination.prefill,
        chunked_prefill=combination.chunking == "chunked",
        kv=combination.kv,
        preemption=combination.preemption,
        eviction=combination.eviction,
        discipline=combination.discipline,
        admission=combination.admission,
        max_prefill_chunk=pick([0, 0, 0, 5, 1]),
        long_prefill_threshold=pick([0, 0, 6, 1000]),
        target_itl_ms=pick([0.0, 0.0, 15.0, 50.0]),
        watermark=pick([0.01, 0.0, 0.2]),
        prefix_caching=pick([True, True, True, False]),
        isolate_tenants=pick([True, False]),
        ageing_s=pick([0.1, 1.0, 0.0, 30.0]),
        tenant_weights=pick([{}, {"a": 3.0}]),
        max_waiting=pick([100, 100, 100, 6]),
        hold_s=5.0,
        max_strikes=pick([4, 2]),
        handover=pick([*Handover]),
    )


class Walk:
    """One history: each step is something that clients, executors or time do.

    Where they depart, executors come and go all the time, and hand over what they can.
    """

    def __init__(self, combination: Combination, seed: int, *, depart: bool = False) -> None:
        self.chance = chance = random.Random(f"{combination} {seed}")
        config = draw_config(combination, chance)
        self.world = World(replace(config, handover=Handover.ALWAYS) if depart else config)
        self.fingerprints = dict.fromkeys(MODELS, 0)
        self.block_size = chance.choice([1, 2, 4, 8])
        self.is_stormy = chance.random() < 0.5
        for _ in range(chance.choice([1, 1, 2])):
            self._attach("m")
        steps: list[tuple[int, Callable[[], None]]] = [
            (10, self._submit),
            (20, self._iterate),
            (5, self.world.turn),
            (5, self._deliver),
            (3, self._abort),
            (1, self._expire),
        ]
        if self.is_stormy:
            steps += [
                (1, lambda: self.world.abort_owner(chance.randrange(3))),
                (1, self._answer_nonsense),
                (2, self._attach_any),
                (1, self._attach_another_model),
                (2, self._lose),
                (1, self._drain),
                (1, self._leave),
                (1, self._pause),
                (1, self._resume),
                (1, self._vacate),
                (3, self._fetch),
            ]
        if depart:
            steps = [step for step in steps if step[1] != self._lose]
            steps += [(8, self._attach_any), (3, self._drain), (2, self._leave), (8, self._fetch), (1, self._lose)]
        self._weights, self._steps = zip(*steps, strict=True)

    def step(self) -> None:
        self.chance.choices(self._steps, self._weights)[0]()
        self.world.check()

    def finish(self) -> None:
        """All results come, every model gets an executor, and everybody is served."""
        world = self.world
        for lane in self._flying():
            world.deliver(lane)
        world.fetches.finish()
        for name in world.scheduler.queues:
            if not any(lane.admits for lane in world.scheduler.availability.lanes_of(name)):
                self._attach(name, 80)
        world.run(20_000)
        for name, queue in world.scheduler.queues.items():
            while len(queue.beyond):  # a spare that stands by does not help them
                self._attach(name, 80)
        world.run(20_000)
        world.check_idle()

    # --- clients ---

    def _submit(self) -> None:
        for _ in range(self.chance.choice([1, 1, 2, 4])):
            self._submit_one()
        if self.chance.random() < 0.1:
            lengths = [self.chance.choice([1, 4, 9, 17]) for _ in range(self.chance.choice([2, 3]))]
            self.world.submit_call(lengths, self.chance.choice([1, 9]), owner=self.chance.choice([0, 1]))

    def _submit_one(self) -> None:
        pick = self.chance.choice
        length = pick([1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 24, 33])
        self.world.submit(
            pick(BASES)[:length] + pick([[], [], [5], [9, 9]]),
            pick([1, 2, 5, 9, 14]),
            n=pick([1, 1, 1, 2, 4]),
            owner=pick([0, 1]),
            priority=pick([0, 0, 0, -1, 2]),
            logprobs=pick([-1, -1, 0, 2]),
            prompt_logprobs=pick([-1, -1, -1, -1, -1, 1]),
            temperature=pick([0.0, 1.0]),
            ignore_eos=pick([True, False]),
            stop_token_ids=pick([[], [7, 30]]),
            model=pick(["m"] * 9 + ["n"]),
            tenant=pick(["", "a", "b"]),
            salt=pick([b"", b"", b"s"]),
            retention=pick([*Retention]),
            deadline_ms=pick([0, 100, 500, 3000]),
            timeout_ms=pick([0] * 6 + [50, 2000]),
            constraint=pick([UNBOUND] * 5 + [Constraint(allowed_ids=np.array([2], np.int32))]),
        )

    def _abort(self) -> None:
        """One, live or not, or one that nobody knows."""
        live = [stream for stream in self.world.streams.values() if stream.accepted and not stream.over]
        known: list[Stream] = live if live and self.chance.random() < 0.7 else list(self.world.streams.values())
        if known:
            self.world.abort(self.chance.choice(known))
        else:
            self.world.scheduler.abort(self.chance.randrange(4), [1000], self.world.now)

    # --- iterations ---

    def _flying(self) -> list[Lane]:
        return [lane for lane in self.world.lanes if lane.epoch in self.world.out]

    def _iterate(self) -> None:
        for _ in range(self.chance.choice([1, 1, 2, 4, 12])):
            self.world.turn()
            self.world.now += self.chance.choice([0.002, 0.01, 0.03])
            for lane in self._flying():
                self.world.deliver(lane)
            self.world.check()

    def _deliver(self) -> None:
        if self.world.out:
            self.world.deliver(self.chance.choice(self._flying()))

    def _expire(self) -> None:
        self.world.now += self.chance.choice([0.1, 1.0, 4.0, 6.0])
        self.world.expire()

    # --- executors ---

    def _model(self, name: str) -> ModelCard:
        """As it is served now, or its next version."""
        lanes = self.world.scheduler.availability.lanes_of(name)
        fingerprint = b"%b %d" % (MODELS[name].fingerprint, self.fingerprints[name])
        return lanes[0].model if lanes else replace(MODELS[name], fingerprint=fingerprint)

    def _attach(self, name: str, num_tokens: int = 0) -> None:
        pick = self.chance.choice
        lanes = self.world.scheduler.availability.lanes_of(name)
        size = lanes[0].block_size if lanes else self.block_size
        blocks = -(-(num_tokens or pick([12, 24, 32, 60, 200])) // size)
        host_blocks = -(-pick([0, 8, 30, 100]) // size)
        spare = self.is_stormy and pick([False, False, False, True])
        seats, budget, transfer = pick([8, 8, 1, 2]), pick([64, 64, 2, 16]), pick([True, True, False])
        self.world.attach(blocks, size, seats, budget, self._model(name), host_blocks, transfer, spare)

    def _attach_any(self) -> None:
        if len(self.world.lanes) < MAX_LANES:
            self._attach(self.chance.choice("mmmn"))

    def _attach_another_model(self) -> None:
        """Other weights or blocks under the name of a model that is served are refused."""
        if not self.world.lanes:
            return
        lane, before = self.chance.choice(self.world.lanes), dict(self.world.scheduler.lanes)
        with pytest.raises(AttachError, match=r"fingerprint"):
            self.world.attach(9, lane.block_size, model=replace(lane.model, fingerprint=b"strange"))
        with pytest.raises(AttachError, match=r"block_size"):
            self.world.attach(9, lane.block_size + 1, model=lane.model)
        assert self.world.scheduler.lanes == before

    def _answer_nonsense(self) -> None:
        """A result that cannot follow from the plan is refused and changes nothing; the lane must go."""
        if not self.world.out:
            return
        lane = self.chance.choice(self._flying())
        result = spoil(lane, self.world.out[lane.epoch].result, self.chance.choice(SPOILS))
        if result is None:
            return
        before = snapshot(lane)
        with pytest.raises(LaneError):
            self.world.scheduler.apply(lane, result, self.world.now)
        assert snapshot(lane) == before and not self.world.scheduler.outbox
        self.world.lose(lane)

    def _lose(self) -> None:
        """An executor dies, with or without a guilty sequence; its model may come back with other weights."""
        if not self.world.lanes:
            return
        lane = self.chance.choice(self.world.lanes)
        guilty: tuple[int, ...] = ()
        blame = self.chance.choice(["nobody", "nobody", "one", "wild"])
        if blame == "one" and lane.epoch in self.world.out:
            plan = self.world.out[lane.epoch].plan
            guilty = (int([*plan.decodes, *plan.prefills][0]),)
        elif blame == "wild":
            guilty = (0, 65_535)
        if self.chance.random() < 0.5 and len(self.world.scheduler.availability.lanes_of(lane.model.name)) == 1:
            self.fingerprints[lane.model.name] += 1
        self.world.lose(lane, guilty)

    def _drain(self) -> None:
        if self.world.lanes:
            self.world.drain(self.chance.choice(self.world.lanes))

    def _pause(self) -> None:
        if self.world.lanes:
            self.world.pause(self.chance.choice(self.world.lanes))

    def _resume(self) -> None:
        """One that was paused, or none that can be resumed."""
        paused = [lane for lane in self.world.lanes if lane.stays]
        if self.world.lanes:
            self.world.resume(self.chance.choice(paused or self.world.lanes))

    def _vacate(self) -> None:
        if self.world.lanes:
            self.world.scheduler.vacate(self.chance.choice(self.world.lanes), self.world.now)

    def _fetch(self) -> None:
        """KV of a hand-over comes, or does not."""
        pick, fetches = self.chance.choice, self.world.fetches
        if fetches.pending:
            fetches.come(pick(sorted(fetches.pending)), pick([1, 1000]), fail=pick([False, False, True]))

    def _leave(self) -> None:
        if self.world.lanes:
            self.world.leave(self.chance.choice(self.world.lanes))


def walk(combination: str, seed: int, steps: int, *, depart: bool = False) -> World:
    """Walk so many steps, then serve everybody. `walk(*)` of what a failure names is that failure again."""
    history, done = Walk(Combination.parse(combination), seed, depart=depart), 0
    try:
        while done < steps:
            history.step()
            done += 1
        history.finish()
    except Exception as error:
        text = f"walk({combination!r}, seed={seed}, steps={steps}, depart={depart}), step {done}"
        text += f": {type(error).__name__}: {error}"
        raise AssertionError(text) from error
    return history.world
