"""One round: its requests and disturbances at their times, the check of every answer, and whether all came to rest."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from dataclasses import dataclass, field, replace

import psutil

from tests.chaos.checker import Excuse, Fault, Finding, Told, check, of_plain
from tests.chaos.client import End, exchange, get
from tests.chaos.disturb import SCHEDULER_FLAGS, Disturber, Run
from tests.chaos.schedule import POISON, Ask, Disturbance, Round
from tests.chaos.services import AT_REST, POLL_S, Services, Settings, Unfit

ANSWER_S = 40.0
"""A request that has no end after so long is lost."""
REST_S = 20.0
"""All must have come to rest, and all executors be back, within so long."""
EOS_AFTER = 90
SPARE_FDS = 4
"""So many more open files than at first are no leak: some are opened when they are first needed."""
WARM_S = 30.0


@dataclass
class Outcome:
    """What a round brought."""

    seed: int
    findings: list[Finding] = field(default_factory=list)
    recoveries_s: list[float] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)
    """How the requests ended."""
    kinds: Counter[str] = field(default_factory=Counter)
    """What was done."""
    handovers: Counter[str] = field(default_factory=Counter)
    """How KV that was to be handed over fared."""


def plain_script() -> dict[str, object]:
    """What the scripted executors of both services do."""
    return {"eos_after": EOS_AFTER}


def stack_settings(base: Settings) -> Settings:
    """Of the services that are disturbed."""
    return replace(base, admin=True, scheduler_flags=[*SCHEDULER_FLAGS, *base.scheduler_flags])


def reference_settings(base: Settings) -> Settings:
    """Of the services that are left in peace: one executor, and no prefix is shared."""
    flags = ["--no-prefix-caching", "--heartbeat-timeout-s", "60"]
    return replace(base, cables=False, frontends=1, executors=1, delay_s=0.0, scheduler_flags=flags)


async def expected(reference: Services, ask: Ask) -> Told:
    """The answer of the services that nobody disturbs. Raises `Unfit` when there is none."""
    body = json.dumps(ask.plain_body).encode()
    answer = await exchange(reference.port, "POST", ask.path, body, patience_s=120)
    if answer.status != 200:
        raise Unfit(f"the undisturbed services answered {answer.status}: {answer.body[:500]!r} to {body[:500]!r}")
    return of_plain(answer.json)


class Rounds:
    """Runs rounds on services that live on from one to the next."""

    def __init__(self, services: Services, reference: Services) -> None:
        self._services, self._reference = services, reference
        self._fds: dict[int, int] = {}
        """The most open files that each process had at rest until it was warm."""
        self._warm: set[int] = set()
        self._handovers: Counter[str] = Counter()
        """Those that have been counted."""

    async def run(self, plan: Round) -> Outcome:
        """Raises `Unfit` when the services cannot be made ready for the round."""
        services, outcome = self._services, Outcome(plan.seed)
        await services.until(services.is_whole, "the services to be whole", REST_S)
        self._prepare(plan)
        runs = [Run(ask, f"chaos-{plan.seed}-{ask.number}") for ask in plan.asks]
        answers = asyncio.gather(*(self._answer(run) for run in runs))
        rights = asyncio.gather(*(self._right(ask) for ask in plan.asks))
        disturber = Disturber(services, runs, measured=plan.is_measured)
        started = time.monotonic()
        deeds = [asyncio.create_task(self._deed(disturber, d, started)) for d in plan.disturbances]
        await answers
        await asyncio.gather(*deeds)
        services.clear()
        disturber.excuse()
        for run, right in zip(runs, await rights, strict=True):
            outcome.findings += check(run.ask, run.answer, right, run.excuses)
            outcome.ends[_end_of(run)] += 1
            if run.recovery_s is not None:
                outcome.recoveries_s.append(run.recovery_s)
        outcome.kinds.update(name_of(d) for d in plan.disturbances)
        outcome.findings += await self._rest()
        outcome.handovers = await self._new_handovers()
        return outcome

    async def _new_handovers(self) -> Counter[str]:
        """Those since the last round. A scheduler that was started anew counts from 0."""
        last, self._handovers = self._handovers, Counter(await self._services.handovers())
        return self._handovers - last if last <= self._handovers else self._handovers

    def _prepare(self, plan: Round) -> None:
        services = self._services
        services.script = {
            **plain_script(),
            "poison_token": POISON,
            "poison_action": plan.poison_action,
            "name_poisoned": plan.name_poisoned,
        }
        for member in services.staying:
            services.tell(member)

    @staticmethod
    async def _deed(disturber: Disturber, disturbance: Disturbance, started: float) -> None:
        await asyncio.sleep(max(0.0, started + disturbance.at_s - time.monotonic()))
        await disturber.apply(disturbance)

    async def _answer(self, run: Run) -> None:
        ask = run.ask
        if ask.poisoned:
            run.excuses.add(Excuse.POISON)
        await asyncio.sleep(ask.begin_s)
        await exchange(
            self._services.port,
            "POST",
            ask.path,
            json.dumps(ask.body).encode(),
            headers={"X-Request-Id": run.request_id},
            answer=run.answer,
            leave_s=ask.leave_s,
            pause_s=ask.pause_s,
            patience_s=ANSWER_S,
        )

    async def _right(self, ask: Ask) -> Told | None:
        return None if ask.poisoned else await expected(self._reference, ask)

    async def _rest(self) -> list[Finding]:
        """Wait until the services are at rest, and tell what is not."""
        deadline = time.monotonic() + REST_S
        while True:
            restless = await self._restless()
            if not restless:
                break
            if time.monotonic() > deadline:
                return [Finding(Fault.LEFT_OVER, text) for text in restless]
            await asyncio.sleep(POLL_S)
        self._note_fds()
        return []

    async def _restless(self) -> list[str]:
        services = self._services
        metrics, attached = await services.look()
        found = [f"{name} is {metrics.get(name)}" for name in AT_REST if metrics.get(name) != 0]
        if not services.are_all(attached):
            found.append(f"the executors {sorted(attached)} are attached")
        states = await services.states()
        found += [f"{name} is {states.get(name)}" for name in sorted(attached) if states.get(name) != "attached"]
        if (await get(services.port, "/health/ready")).status != 200:
            found.append("the service is not ready")
        if len(services.frontend_pids()) != services.settings.frontends:
            found.append(f"{len(services.frontend_pids())} frontends")
        for role, pid, count in self._open_files():
            if pid in self._warm and count > self._fds[pid] + SPARE_FDS:
                found.append(f"{role} has {count} open files, at first it had {self._fds[pid]}")
        return found

    def _open_files(self) -> list[tuple[str, int, int]]:
        services = self._services
        roles = [("scheduler", services.scheduler.pid), *(("frontend", pid) for pid in services.frontend_pids())]
        roles += [(member.name, member.process.pid) for member in services.staying]
        found = []
        for role, pid in roles:
            try:
                found.append((role, pid, psutil.Process(pid).num_fds()))
            except psutil.Error:
                continue  # it has just ended
        return found

    def _note_fds(self) -> None:
        """The most that a process had until it first came to rest when warm: what it always needs is open by then."""
        for _, pid, count in self._open_files():
            if pid not in self._warm:
                self._fds[pid] = max(count, self._fds.get(pid, 0))
                if _age_s(pid) > WARM_S:
                    self._warm.add(pid)


def _age_s(pid: int) -> float:
    with contextlib.suppress(psutil.Error):
        return time.time() - psutil.Process(pid).create_time()
    return 0.0


def name_of(disturbance: Disturbance) -> str:
    """What was done, for the report."""
    if disturbance.blow is None:
        return disturbance.action or disturbance.kind
    return f"{disturbance.kind}-{disturbance.blow}-{'target' if disturbance.at_target else 'source'}"


def _end_of(run: Run) -> str:
    if run.answer.end is not End.WHOLE:
        return run.answer.end.value
    failed = run.answer.status != 200 or any("error" in event for _, event in run.answer.events[-1:])
    return "error" if failed else "answered"
