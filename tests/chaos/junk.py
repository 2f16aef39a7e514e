"""`python -m tests.chaos.junk`: mutations of real messages on every socket; the services live, others are unharmed.

`--messages` are sent to each of three: the executors' socket, the frontends' socket, and as plans to an executor. Who
may speak on a socket is a matter of keys and of the file system; here it is seen that junk does no harm.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import zmq

from common.wire import (
    Abort,
    Alive,
    Drain,
    Fault,
    FrontendHello,
    Hello,
    Inquiry,
    Leaving,
    Message,
    NewSequence,
    Plan,
    Reset,
    Result,
    SamplingParams,
    Submit,
    WireError,
    decode,
    encode,
)
from tests.chaos.client import Answer, exchange
from tests.chaos.mutate import Mutator
from tests.chaos.services import Services, Settings, served, spawn
from tests.common.messages import MESSAGES, card, example
from tests.executor.scripted_scheduler import ScriptedScheduler

PEER_MESSAGES = 500
"""So many come over one connection; then a new one is made."""
MODEL = ["--model", "/nonexistent", "--served-model-name", "fake"]


def everything() -> list[Message]:
    """One of each message there is, and fuller ones of those that matter. A stranger's model is nobody else's."""
    tokens, slots = np.arange(6, 40, dtype=np.int32), np.array([0, 1, 2], np.uint16)
    params = SamplingParams(4, temperature=0.5, seed=7, stop_token_ids=tokens[:2], logprobs=1)
    hello = example(Hello)
    return [
        *(example(cls) for cls in MESSAGES),
        Hello(hello.protocol, "stranger", b"s" * 16, "cpu", hello.limits, card(name="stranger", eos_ids=(1, 2))),
        Result(1, 1, tokens[:3], np.zeros(3, np.uint8)),
        Fault(1, 1, slots, "plan", "no"),
        Leaving(1, "stop"),
        Alive(1),
        Submit(1 << 20, 2, "junk", "model", tokens, params),
        Submit(1 << 21, 1, "junk-2", "model", tokens[:1], SamplingParams(3)),
        Abort(np.arange(1 << 20, (1 << 20) + 9, dtype=np.uint32)),
        Inquiry(3, "junk"),
        FrontendHello("junk"),
    ]


def pelt(address: str, frames: Callable[[], list[bytes]], count: int, identity: bytes = b"") -> None:
    """Send so many messages to a ROUTER, and read whatever it answers."""
    with zmq.Context() as context:
        sent = 0
        while sent < count:
            with context.socket(zmq.DEALER) as peer:
                peer.linger = 2000
                if identity:
                    peer.setsockopt(zmq.IDENTITY, identity)
                peer.connect(address)
                for _ in range(min(PEER_MESSAGES, count - sent)):
                    peer.send_multipart(frames())
                    sent += 1
                    while peer.poll(0):
                        peer.recv_multipart()


def pelt_bare(port: int, count: int, seed: int) -> None:
    """Bytes that are not even ZeroMQ's, over TCP."""
    draw = random.Random(seed)
    greeting = b"\xff\0\0\0\0\0\0\0\1\x7f\3\0NULL" + b"\0" * 48
    for _ in range(count):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            connection.sendall(greeting[: draw.randrange(len(greeting))] + draw.randbytes(draw.randrange(200)))


class Traffic:
    """Requests that go on meanwhile, and must be answered as ever."""

    def __init__(self, services: Services) -> None:
        self._services, self._stopping = services, False
        self.num_answered = 0
        self.wrong: list[str] = []

    async def text(self) -> str:
        body = {"model": "model", "prompt": [5, 6, 7], "max_tokens": 40, "temperature": 0, "ignore_eos": True}
        data = json.dumps(body).encode()
        answer: Answer = await exchange(self._services.port, "POST", "/v1/completions", data)
        return (
            str(answer.json["choices"][0]["text"]) if answer.status == 200 else f"status {answer.status} {answer.end}"
        )

    async def run(self, right: str) -> None:
        """Ask again and again, and once more after `stop`."""
        more = True
        while more:
            more = not self._stopping
            text = await self.text()
            self.num_answered += 1
            if text != right:
                self.wrong.append(f"other traffic: {text[:200]!r} for {right[:200]!r}")
            await asyncio.sleep(0.02)

    def stop(self) -> None:
        self._stopping = True


async def at_the_scheduler(services: Services, count: int, seed: int) -> list[str]:
    """`count` on each of the sockets of a scheduler that runs. Returns what is wrong."""
    pids = services.pids()
    traffic = Traffic(services)
    task = asyncio.create_task(traffic.run(await traffic.text()))
    one, other = Mutator(seed, everything()), Mutator(seed + 1, everything())
    inside = f"ipc://{services.folder}/run/core.sock"
    await asyncio.gather(
        asyncio.to_thread(pelt, f"tcp://127.0.0.1:{services.executor_port}", one.frames, count),
        asyncio.to_thread(pelt, inside, other.frames, count, b"junk"),
        asyncio.to_thread(pelt_bare, services.executor_port, min(200, count // 20), seed),
    )
    traffic.stop()
    await task
    found = list(traffic.wrong[:5])
    if services.pids() != pids:
        found.append(f"the processes were {pids}, and are {services.pids()}")
    # Some messages were whole, and asked for something.
    await asyncio.to_thread(pelt, inside, lambda: [encode(FrontendHello("junk"))], 1, b"junk")
    found += await services.busy()
    counted = (await services.metrics()).get("gilir_junk_messages_total", 0)
    print(f"the scheduler's sockets: messages {count} each, on the executors' counted as junk {counted:.0f}")
    print(f"other requests answered meanwhile: {traffic.num_answered}, wrong {len(found)}")
    return found


def conversation(epoch: int) -> list[Plan]:
    """Three iterations of two sequences."""
    ids, slots = np.int32, np.uint16
    params = SamplingParams(20, temperature=0.0)
    new = tuple(
        NewSequence(slot, 1, np.arange(6 + slot, 26 + slot, dtype=ids), 20, 0, np.array(blocks, ids), params)
        for slot, blocks in ((0, [3, 4]), (1, [5, 6]))
    )
    both = np.array([0, 1], slots)
    return [
        Plan(epoch, 1, prefills=both, prefill_lengths=np.array([20, 20], ids), new=new),
        Plan(epoch, 2, decodes=both),
        Plan(epoch, 3, decodes=both[:1], freed=both[1:], copies=np.array([3, 9], ids)),
    ]


def _asks_to_go(frames: list[bytes]) -> bool:
    """Whether junk has become a whole `Drain`, which an executor obeys."""
    with contextlib.suppress(WireError):
        return len(frames) == 1 and isinstance(decode(frames[0]), Drain)
    return False


class PlanPelter:
    """Attaches an executor, and sends it plans of which one is spoilt, over and over."""

    def __init__(self, core: ScriptedScheduler, seed: int) -> None:
        self._core, self._draw = core, random.Random(seed)
        self._epoch = 0
        self.answers: Counter[str] = Counter()

    def attach(self) -> None:
        """End the epoch before, if there is one, and begin another."""
        if self._epoch:
            self._core.send(Reset(self._epoch, "next"))
        self._epoch += 1
        self._wait_hello()
        self._core.attach(self._epoch, 500)

    def _wait_hello(self) -> None:
        """What the executor says to junk comes before it."""
        while True:
            peer, message = self._core.receive_any()
            if isinstance(message, Hello):
                self._core.peer = peer
                return
            self.answers[type(message).__name__.lower()] += 1

    def spoilt(self) -> None:
        """A conversation in which one plan is junk."""
        self.attach()
        plans = conversation(self._epoch)
        place = self._draw.randrange(len(plans))
        for plan in plans[:place]:
            self._core.send(plan)
            self._core.receive(Result)
        others = [*plans, Reset(self._epoch, "no")]
        mutator = Mutator(self._draw.randrange(1 << 60), [plans[place]] * 8 + others, bytes_share=0.1)
        frames = mutator.frames()
        while _asks_to_go(frames):
            frames = mutator.frames()
        self._core.send_raw(*frames)

    def whole(self) -> list[int]:
        """The tokens of an undisturbed conversation."""
        self.attach()
        tokens: list[int] = []
        for plan in conversation(self._epoch):
            self._core.send(plan)
            tokens += self._core.receive(Result).tokens.tolist()
        return tokens


def at_an_executor(folder: Path, count: int, seed: int, *, real: bool = False) -> list[str]:
    """Spoilt plans to an executor process. Returns what is wrong."""
    core = ScriptedScheduler()
    module, flags = "executor_svc.fake", MODEL
    if real:
        module, flags = "executor_svc", ["--dtype", "float32", "--threads", "1", "--num-blocks", "64"]
    command = [sys.executable, "-m", module, "--scheduler", core.address, "--name", "victim", *flags]
    process = spawn(command, folder / "victim.log")
    try:
        pelter = PlanPelter(core, seed)
        core.receive_hello(120)  # it comes again
        right = pelter.whole()
        for _ in range(count):
            pelter.spoilt()
        found = []
        if pelter.whole() != right:
            found.append("the executor says something else than before")
        if process.poll() is not None:
            found.append(f"the executor ended with status {process.returncode}")
    except (TimeoutError, AssertionError) as error:
        found = [f"the executor does not answer: {error}; its status is {process.poll()}"]
    finally:
        process.kill()
        process.wait()
        core.close()
    print(f"plans: messages {count} answered {dict(pelter.answers)} wrong {len(found)}")
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.junk", description=__doc__)
    parser.add_argument("--messages", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--real", action="store_true", help="the plans go to an executor with the embedded model")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="gilir-junk-") as folder:
        settings = Settings(Path(folder), frontends=1, delay_s=0.002)
        found = asyncio.run(
            served(settings, lambda services: at_the_scheduler(services, options.messages, options.seed))
        )
        found += at_an_executor(Path(folder), options.messages, options.seed, real=options.real)
    for text in found:
        print(text)
    print(f"messages {options.messages} wrong {len(found)}")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
