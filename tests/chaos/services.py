"""The services under test, as real processes: a scheduler with its frontends, executors, and a network between them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil

from common.processes import end_with_parent
from deploy.local import ROOT
from executor_svc.fake_model import DEFAULT_MODEL
from tests.chaos.cables import Cable
from tests.chaos.client import get
from tests.chaos.relay import Relay, Weather

T = TypeVar("T")

NUM_EXECUTORS = 2
START_S = 60.0
POLL_S = 0.1
"""Between two looks; the core tells its figures four times a second."""
AT_REST = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "gilir_live_sequences",
    "gilir_kv_blocks_referenced",
)
"""Gauges that are 0 when nothing waits or runs, and every block is free or evictable."""
_SERIES = re.compile(r"^([a-z_:]+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
_HANDOVERS = re.compile(r'^gilir_handovers_total\{.*outcome="([^"]*)".*\} (\S+)$', re.MULTILINE)
_ENGINE = re.compile(r'^gilir_token_budget\{.*engine="([^"]*)"', re.MULTILINE)


class Unfit(Exception):
    """The services cannot be brought to where a round can begin."""


def free_port() -> int:
    """Of those that the system gives to no outgoing connection: services come back to their ports."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def spawn(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    """A service process, which ends with this one; its output is added to the log."""
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )


@dataclass(eq=False)
class Member:
    """One executor process and its way to the scheduler."""

    name: str
    process: subprocess.Popen[bytes]
    relay: Relay
    cable: Cable | None
    script: Path
    spare: bool = False
    """It takes sequences while no other does, and is none of those that are wanted."""
    ready: bool = False
    """It has been attached."""
    leaving: bool = False
    """It was told to go."""

    @property
    def lives(self) -> bool:
        return self.process.poll() is None

    def signal(self, number: int) -> None:
        if self.lives:
            self.process.send_signal(number)

    def leave(self) -> None:
        """Ask it to go."""
        self.leaving = True
        self.signal(signal.SIGTERM)


@dataclass
class Settings:
    """How the services of a run are set up."""

    folder: Path
    real: bool = False
    """Executors that run the embedded model, instead of scripted ones."""
    cables: bool = False
    """Executors in namespaces of their own."""
    frontends: int = 2
    executors: int = NUM_EXECUTORS
    admin: bool = False
    """The scheduler has an admin API."""
    delay_s: float = 0.004
    """What an iteration of a scripted executor takes at least."""
    patience_s: float = 1.5
    """An executor gives up a scheduler that is silent for so long."""
    scheduler_flags: list[str] = field(default_factory=list)
    executor_flags: list[str] = field(default_factory=list)


class Services:
    """A scheduler and its executors; a keeper starts a new executor wherever one has ended."""

    def __init__(self, settings: Settings, name: str = "stack") -> None:
        self.settings, self.name = settings, name
        self.folder = settings.folder / name
        self.folder.mkdir(parents=True, exist_ok=True)
        self.port, self.executor_port, self.admin_port = free_port(), free_port(), free_port()
        self.members: list[Member] = []
        self.wanted = settings.executors
        """How many executors the keeper sees to."""
        self.script: dict[str, Any] = {}
        """What every scripted executor does, beside what one alone is told."""
        self.num_started = 0
        self._cables: list[Cable] = []
        self._keeper: asyncio.Task[None] | None = None

    # --- life ---

    async def start(self) -> None:
        """Start all. Raises `Unfit` when the services do not become ready; `stop` must be called then too."""
        self.start_scheduler()
        self._keeper = asyncio.create_task(self._keep())
        await self.until(self.is_whole, "the services to be ready", START_S)

    async def stop(self) -> None:
        """End all. Raises `Unfit` when the scheduler does not end by itself."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        self.scheduler.terminate()
        for member in self.members:
            member.signal(signal.SIGCONT)
            member.signal(signal.SIGKILL)
        try:
            await self.until(lambda: self.scheduler.poll() is not None, "the scheduler to end", 20)
        finally:
            self.scheduler.kill()
            for member in list(self.members):
                await self._bury(member)
            for cable in self._cables:
                cable.remove()

    def start_scheduler(self) -> None:
        flags = ["--port", str(self.port), "--executor-bind", f"tcp://127.0.0.1:{self.executor_port}"]
        flags += ["--run-dir", str(self.folder / "run"), "--frontends", str(self.settings.frontends)]
        flags += ["--admin-port", str(self.admin_port)] if self.settings.admin else []
        command = [sys.executable, "-m", "scheduler_svc", *flags, *self.settings.scheduler_flags]
        self.scheduler = spawn(command, self.folder / "scheduler.log")

    async def _keep(self) -> None:
        """Start executors where too few are left, and a scheduler that could not have its port yet."""
        while True:
            for member in [m for m in self.members if not m.lives]:
                await self._bury(member)
            if self.scheduler.poll() is not None:
                self.start_scheduler()
            while len(self.staying) < self.wanted:
                await self.start_executor()
            await asyncio.sleep(0.03)

    async def start_executor(self, *, spare: bool = False) -> Member:
        self.num_started += 1
        name = f"{'spare' if spare else 'real' if self.settings.real else 'fake'}-{self.num_started}"
        cable = self._cable()
        relay = Relay(self.executor_port, "127.0.0.1" if cable is None else cable.host)
        await relay.start()
        script = self.folder / f"{name}.json"
        self._write_script(script)
        flags = ["--scheduler", f"tcp://{relay.host}:{relay.port}", "--name", name, "--model", str(DEFAULT_MODEL)]
        flags += ["--served-model-name", "model", "--num-blocks", "96", "--max-num-seqs", "8"]
        flags += ["--scheduler-timeout-s", str(self.settings.patience_s), *self._kind_flags(script)]
        flags += ["--transfer-bind", f"tcp://{'127.0.0.1' if cable is None else cable.far_host}:*"]
        flags += ["--spare"] if spare else []
        module = "executor_svc" if self.settings.real else "executor_svc.fake"
        inside = [] if cable is None else cable.command
        process = spawn([*inside, sys.executable, "-m", module, *flags], self.folder / "executors.log")
        member = Member(name, process, relay, cable, script, spare)
        self.members.append(member)
        return member

    def _kind_flags(self, script: Path) -> list[str]:
        if self.settings.real:
            return ["--dtype", "float32", "--threads", "1", "--allow-insecure-dial", *self.settings.executor_flags]
        flags = ["--script", str(script), "--max-num-batched-tokens", "128", "--hello-interval-s", "0.3"]
        return [*flags, *self.settings.executor_flags]

    def _cable(self) -> Cable | None:
        """One that nobody uses, or a new one."""
        if not self.settings.cables:
            return None
        used = {member.cable for member in self.members}
        idle = next((cable for cable in self._cables if cable not in used), None)
        if idle is None:
            idle = Cable()
            self._cables.append(idle)
        idle.plug()
        idle.join()
        return idle

    async def _bury(self, member: Member) -> None:
        member.process.wait()
        self.members.remove(member)
        member.script.unlink(missing_ok=True)
        await member.relay.stop()

    # --- steering ---

    @property
    def staying(self) -> list[Member]:
        """Executors that live and are not leaving, the oldest first; no spares."""
        return [member for member in self.members if member.lives and not member.leaving and not member.spare]

    @property
    def ready(self) -> list[Member]:
        """Of those, the ones that have been attached."""
        return [member for member in self.staying if member.ready]

    def tell(self, member: Member, **script: Any) -> None:
        """Give a scripted executor another script, from its next plan on. It must be ready to take it."""
        if member.ready and not self.settings.real:
            self._write_script(member.script, **script)
            member.signal(signal.SIGHUP)

    def _write_script(self, file: Path, **script: Any) -> None:
        """Whole at any moment: it may be read now."""
        draft = file.with_suffix(".new")
        draft.write_text(json.dumps({"delay_s": self.settings.delay_s, **self.script, **script}))
        draft.replace(file)

    def clear(self) -> None:
        """Fair weather, plain scripts, and no executor more than is wanted."""
        self.wanted = self.settings.executors
        for member in self.members:
            member.relay.set(Weather.FAIR)
            if member.cable is not None:
                member.cable.plug()
                member.cable.join()
            member.signal(signal.SIGCONT)
            self.tell(member)
        spares = [member for member in self.members if member.spare and not member.leaving]
        for member in [*self.staying[self.wanted :], *spares]:
            member.leave()

    # --- looking ---

    async def look(self) -> tuple[dict[str, float], set[str]]:
        """Sums of each metric's series, and names of the executors that have a lane; empty when nobody answers."""
        answer = await get(self.port, "/metrics")
        text = answer.body.decode() if answer.status == 200 else ""
        totals: dict[str, float] = {}
        for name, value in _SERIES.findall(text):
            totals[name] = totals.get(name, 0.0) + float(value)
        return totals, set(_ENGINE.findall(text))

    async def metrics(self) -> dict[str, float]:
        return (await self.look())[0]

    async def handovers(self) -> dict[str, int]:
        """How many there have been since the scheduler began, by how they ended."""
        text = (await get(self.port, "/metrics")).body.decode()
        return {outcome: int(float(value)) for outcome, value in _HANDOVERS.findall(text)}

    async def states(self) -> dict[str, str]:
        """The state of each attached executor, as operators see it; empty when nobody answers."""
        answer = await get(self.admin_port, "/admin/executors")
        return {told["name"]: told["state"] for told in answer.json["data"]} if answer.status == 200 else {}

    async def executor_of(self, request_id: str) -> str | None:
        """The executor that runs a request's first sequence."""
        answer = await get(self.port, f"/v1/requests/{request_id}")
        if answer.status != 200 or not answer.json["sequences"]:
            return None
        name: str | None = answer.json["sequences"][0]["executor"]
        return name

    def frontend_pids(self) -> list[int]:
        with contextlib.suppress(psutil.Error):
            children = psutil.Process(self.scheduler.pid).children()
            return [child.pid for child in children if "scheduler_svc.frontend" in _command_of(child)]
        return []

    async def is_whole(self) -> bool:
        """Whether all executors are attached, no other is, and the service says that it is ready."""
        _, attached = await self.look()
        return self.are_all(attached) and (await get(self.port, "/health/ready")).status == 200

    def are_all(self, attached: set[str]) -> bool:
        """Whether these are the executors that there should be. Those among them are ready from now on."""
        for member in self.staying:
            member.ready |= member.name in attached
        names = {member.name for member in self.staying}
        return len(names) == self.settings.executors and names == attached

    def pids(self) -> list[int]:
        """Of all processes that should live on."""
        return [self.scheduler.pid, *self.frontend_pids(), *(member.process.pid for member in self.members)]

    async def busy(self, patience_s: float = 10.0) -> list[str]:
        """Wait for rest; the gauges that are not 0 then."""
        deadline = time.monotonic() + patience_s
        while True:
            metrics = await self.metrics()
            found = [f"{name} is {metrics.get(name)}" for name in AT_REST if metrics.get(name) != 0]
            if not found or time.monotonic() > deadline:
                return found
            await asyncio.sleep(POLL_S)

    async def until(self, condition: Callable[[], Any], what: str, patience_s: float) -> None:
        """Poll until a condition, which may be awaitable, holds. Raises `Unfit` when it does not in time."""
        deadline = time.monotonic() + patience_s
        while True:
            holds = condition()
            if asyncio.iscoroutine(holds):
                holds = await holds
            if holds:
                return
            if time.monotonic() > deadline:
                raise Unfit(f"waited {patience_s:g} s for {what}; logs are in {self.folder}")
            await asyncio.sleep(POLL_S)


def _command_of(process: psutil.Process) -> list[str]:
    """Empty when it has ended."""
    try:
        command: list[str] = process.cmdline()
    except psutil.Error:
        return []
    return command


async def served(settings: Settings, use: Callable[[Services], Awaitable[T]]) -> T:
    """Start services, use them, and stop them. Raises `Unfit`."""
    services = Services(settings)
    try:
        await services.start()
        return await use(services)
    finally:
        await services.stop()
