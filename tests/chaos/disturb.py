"""What is done to the services in a round."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from dataclasses import dataclass, field, replace

import psutil

from tests.chaos.checker import Excuse
from tests.chaos.client import Answer, End
from tests.chaos.relay import Weather
from tests.chaos.schedule import Ask, Disturbance, Kind
from tests.chaos.services import POLL_S, Member, Services
from tests.chaos.steering import Operator

HOLD_S = 16.0
"""Longer than executors take to start on a busy machine: after it, requests end with an error."""
HEARTBEAT_TIMEOUT_S = 1.0
ITERATION_TIMEOUT_S = 2.0
GRACE_S = 3.0
SLOW_S = 0.8
"""So long an executor, or its network, is slow."""
REPLACE_S = 10.0
"""An executor that is to be replaced goes at the latest then, whether its successor is there or not."""
QUIET_S = 0.03
"""A stopped executor's last words have been read after so long."""
SCHEDULER_FLAGS = [
    *("--heartbeat-ms", "100", "--heartbeat-timeout-s", str(HEARTBEAT_TIMEOUT_S)),
    *("--iteration-timeout-s", str(ITERATION_TIMEOUT_S), "--hold-s", str(HOLD_S), "--grace-s", str(GRACE_S)),
]


@dataclass(eq=False)
class Run:
    """One request under way."""

    ask: Ask
    request_id: str
    answer: Answer = field(default_factory=Answer)
    excuses: set[Excuse] = field(default_factory=set)
    killed_at: float | None = None
    """When the executor that ran it was killed."""

    @property
    def is_open(self) -> bool:
        return self.answer.end is End.OPEN

    @property
    def recovery_s(self) -> float | None:
        """From the kill to the next token."""
        after = [at for at, _ in self.answer.events if self.killed_at is not None and at > self.killed_at]
        return after[0] - self.killed_at if after and self.killed_at is not None else None


class Disturber:
    """Applies a round's disturbances. `runs` grows while the round goes on."""

    def __init__(self, services: Services, runs: list[Run], *, measured: bool) -> None:
        self._services, self._runs, self._measured = services, runs, measured
        self._operator = Operator(services)
        self._dead_ports: set[int] = set()
        """Clients' ports whose connections died with a frontend."""

    def excuse(self) -> None:
        """At the end of the round: who was connected to a frontend that was killed may have lost its connection."""
        for run in self._runs:
            if run.answer.port in self._dead_ports:
                run.excuses.add(Excuse.FRONTEND)

    async def apply(self, disturbance: Disturbance) -> None:
        services, kind = self._services, disturbance.kind
        match kind:
            case Kind.FRONTEND:
                await self._kill_frontend(disturbance.victim)
            case Kind.THIRD:
                services.wanted += 1
            case Kind.KILL_ALL | Kind.HOLD:
                await self._kill_all(hold=kind is Kind.HOLD)
            case Kind.TERM_SCHEDULER | Kind.KILL_SCHEDULER:
                await self._end_scheduler(kill=kind is Kind.KILL_SCHEDULER)
            case Kind.MODEL:
                await self._operator.pause_model(disturbance.seconds)
            case Kind.SPARE:
                await self._kill_all_but_a_spare()
            case _ if services.ready:
                await self._to_executor(services.ready[disturbance.victim % len(services.ready)], disturbance)

    async def _to_executor(self, member: Member, disturbance: Disturbance) -> None:
        seconds = disturbance.seconds
        match disturbance.kind:
            case Kind.KILL:
                await self._kill(member)
            case Kind.STOP:
                member.signal(signal.SIGSTOP)
                await asyncio.sleep(seconds)
                member.signal(signal.SIGCONT)
            case Kind.SLOW:
                self._services.tell(member, delay_s=seconds)
                await asyncio.sleep(SLOW_S)
                self._services.tell(member)
            case Kind.ACT:
                assert disturbance.action is not None
                self._services.tell(member, actions={1: disturbance.action})
            case Kind.DRAIN:
                await self._succeed()
                member.leave()
            case Kind.RELEASE:
                await self._succeed()
                await self._operator.release(member)
            case Kind.PAUSE:
                await self._operator.drain(member, disturbance.timeout_s)
                await asyncio.sleep(seconds)
                await self._operator.resume(member)
            case Kind.STRIKE:
                await self._strike(member, disturbance)
            case Kind.APART if member.cable is not None:
                member.cable.part()
                await asyncio.sleep(seconds)
                member.cable.join()
            case Kind.CABLE if member.cable is not None:
                member.cable.pull()
                await asyncio.sleep(seconds)
                member.cable.plug()
            case Kind.CABLE:
                await self._weather(member, Weather.FROZEN, seconds)
            case Kind.CUT:
                await self._weather(member, Weather.CUT, seconds)
            case Kind.HALF:
                await self._weather(member, Weather.HALF, seconds)
            case Kind.LOSS:
                await self._weather(member, Weather.LOSSY, seconds)
            case Kind.DELAY:
                member.relay.set(Weather.SLOW, seconds)
                await asyncio.sleep(SLOW_S)
                member.relay.set(Weather.FAIR)

    @staticmethod
    async def _weather(member: Member, weather: Weather, seconds: float) -> None:
        member.relay.set(weather)
        await asyncio.sleep(seconds)
        member.relay.set(Weather.FAIR)

    async def _kill(self, member: Member) -> None:
        member.signal(signal.SIGSTOP)
        await asyncio.sleep(QUIET_S)
        riders = await self._streams_on(member.name) if self._measured else []
        killed_at = time.monotonic()
        member.signal(signal.SIGKILL)
        for run in riders:
            run.killed_at = killed_at

    async def _streams_on(self, name: str) -> list[Run]:
        """Requests whose one stream lives on an executor and has begun."""
        found = [run for run in self._runs if run.is_open and run.answer.events and run.ask.is_single]
        names = await asyncio.gather(*(self._services.executor_of(run.request_id) for run in found))
        return [run for run, executor in zip(found, names, strict=True) if executor == name]

    async def _kill_all(self, *, hold: bool) -> None:
        services = self._services
        if hold:
            services.wanted = 0
        for member in services.members:
            member.signal(signal.SIGKILL)
        if hold:
            self._excuse_open(Excuse.HOLD)
            await asyncio.sleep(HOLD_S + 0.5)
            self._excuse_open(Excuse.HOLD)
            services.wanted = services.settings.executors

    async def _succeed(self, *, spare: bool = False) -> Member:
        """Start one more executor, and wait until it is attached, or has had the time for it."""
        services = self._services
        successor = await services.start_executor(spare=spare)
        deadline = time.monotonic() + REPLACE_S
        while successor.name not in (await services.look())[1] and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
        return successor

    async def _kill_all_but_a_spare(self) -> None:
        await self._succeed(spare=True)
        for member in self._services.staying:
            member.signal(signal.SIGKILL)

    async def _strike(self, member: Member, disturbance: Disturbance) -> None:
        """While an executor is drained, something befalls it or the one that its sequences go to."""
        assert disturbance.blow is not None
        others = [other for other in self._services.ready if other is not member]
        await self._operator.drain(member)
        await asyncio.sleep(disturbance.gap_s)
        struck = others[0] if disturbance.at_target and others else member
        await self._to_executor(struck, replace(disturbance, kind=disturbance.blow))
        await self._operator.resume(member)

    async def _kill_frontend(self, victim: int) -> None:
        pids = self._services.frontend_pids()
        if not pids:
            return
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pids[victim % len(pids)])
            process.suspend()
            await asyncio.sleep(QUIET_S)
            # Whoever it has accepted dies with it; who still stands in the listening socket's queue does not.
            self._dead_ports |= {c.raddr.port for c in process.net_connections("tcp") if c.raddr}
            process.kill()

    async def _end_scheduler(self, *, kill: bool) -> None:
        excuse = Excuse.DEAD if kill else Excuse.SHUTDOWN
        scheduler = self._services.scheduler
        self._excuse_open(excuse)
        scheduler.send_signal(signal.SIGKILL if kill else signal.SIGTERM)
        while scheduler.poll() is None or not await self._services.is_whole():
            # Also those that come before it is back.
            self._excuse_open(excuse)
            await asyncio.sleep(POLL_S)
        self._excuse_open(excuse)

    def _excuse_open(self, excuse: Excuse) -> None:
        for run in self._runs:
            if run.is_open:
                run.excuses.add(excuse)
