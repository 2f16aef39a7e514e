"""A scripted executor: numpy only, speaks and checks the real protocol, and does what its `Script` says.

In a test: `FakeExecutor(address, Script(...))` runs it in a thread; `python -m executor_svc.fake` is a process, which
reads its script anew at SIGHUP.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

import numpy as np
import zmq
from pydantic import Field

from common.logs import configure_logs
from common.settings import ServiceSettings
from common.wire import PROTOCOL_VERSION, Fault, Hello, Limits, ModelCard, Plan, Result, TransferPoint, Welcome
from executor_svc.fake_model import DEFAULT_MODEL, card_from_folder, invented_card, readable_tokens
from executor_svc.fake_runner import Dead, ScriptedRunner
from executor_svc.handover import Exchange, TransferSocket
from executor_svc.link import Link, LinkOptions, RefusedError
from executor_svc.pseudo_model import PseudoBlocks
from executor_svc.script import Action, Script
from executor_svc.signals import install_signal_handlers
from executor_svc.sockets import Dialing

DEFAULT_LIMITS = Limits(block_size=16, num_blocks=256, num_host_blocks=0, max_num_seqs=8, max_num_batched_tokens=256)


class ScriptedLink(Link):
    """A link that can also misbehave."""

    def __init__(
        self, options: LinkOptions, hello: Hello, runner: ScriptedRunner, exchange: Exchange | None = None
    ) -> None:
        super().__init__(options, hello, runner, exchange)
        self._runner = runner
        self._outbox: queue.SimpleQueue[list[bytes]] = queue.SimpleQueue()
        self._last_result: Result | None = None
        self.epochs: list[int] = []
        """Every epoch it was welcomed to."""
        self.changed = threading.Condition()

    def send_raw(self, *frames: bytes) -> None:
        """Send frames as they are, from any thread."""
        self._outbox.put(list(frames))
        self._waker.wake()

    def abandon(self) -> None:
        """End without a word, as a killed process would; from any thread."""
        self._done = True
        self._waker.wake()

    def _speak(self) -> float | None:
        while not self._outbox.empty():
            self._dealer.send_multipart(self._outbox.get(), zmq.DONTWAIT)
        return super()._speak()

    def _on_welcome(self, welcome: Welcome) -> None:
        super()._on_welcome(welcome)
        with self.changed:
            self.epochs.append(welcome.epoch)
            self.changed.notify_all()

    def _run(self, plan: Plan) -> Result | Fault:
        if self._runner.next_action() is Action.SILENCE:
            self._stop_heartbeat()
        return super()._run(plan)

    def _answer(self, plan: Plan, answer: Result | Fault) -> None:
        action = self._runner.last_action
        if isinstance(answer, Result):
            if action is Action.JUNK:
                self._send_bytes(b"\x93junk")
            elif action is Action.WRONG_EPOCH:
                self._send(replace(answer, epoch=answer.epoch + 1_000_000))
            elif action is Action.EXTRA:
                answer = replace(answer, tokens=np.append(answer.tokens, 1), finish=np.append(answer.finish, 0))
            elif action is Action.STALE and self._last_result is not None:
                self._send(self._last_result)
            elif action is Action.BAD_FINISH:
                answer = replace(answer, finish=answer.finish + np.uint8(200))
            elif action is Action.SHORT:
                answer = replace(answer, tokens=answer.tokens[1:], finish=answer.finish[1:])
            elif action is Action.BAD_TOKEN:
                answer = replace(answer, tokens=answer.tokens + np.int32(self.hello.model.vocab_size))
            elif action is Action.DOUBLE:
                super()._answer(plan, answer)
            self._last_result = answer
        super()._answer(plan, answer)


class FakeExecutor:
    """A scripted executor in a thread of this process. A context manager: leaves cleanly at the end."""

    def __init__(
        self,
        scheduler: str,
        script: Script | None = None,
        *,
        name: str = "fake",
        model: ModelCard | None = None,
        limits: Limits = DEFAULT_LIMITS,
        spare: bool = False,
        scheduler_timeout_s: float = 5.0,
        grace_s: float = 10.0,
        hello_interval_s: float = 0.2,
        verify: bool = True,
        record_plans: bool = True,
        on_death: Callable[[], None] | None = None,
        server_key: bytes = b"",
        secret_key: bytes = b"",
        transfer_bind: str = "",
    ) -> None:
        """`on_death`: what a scripted death does beside ending the thread (a process of its own exits).

        `transfer_bind`: where other executors read its KV; empty: it takes no part in hand-overs.
        """
        self.script, self.model, self.limits, self.name = script or Script(), model or invented_card(), limits, name
        self.runner = ScriptedRunner(
            self.script, self.model, limits, verify=verify, record_plans=record_plans, on_death=on_death
        )
        exchange: Exchange | None = None
        if transfer_bind:
            exchange = Exchange(TransferSocket(transfer_bind, secret_key), PseudoBlocks(self.runner.pseudo))
        self.hello = Hello(
            protocol=PROTOCOL_VERSION,
            name=name,
            incarnation=os.urandom(16),
            device="fake",
            limits=limits,
            model=self.model,
            spare=spare,
            transfer=TransferPoint() if exchange is None else exchange.point,
        )
        options = LinkOptions(
            Dialing(scheduler, scheduler_timeout_s, server_key, secret_key), hello_interval_s, grace_s
        )
        self.link = ScriptedLink(options, self.hello, self.runner, exchange)
        self.error: BaseException | None = None
        """What ended the thread, other than a drain, a stop or a death."""
        self._thread = threading.Thread(target=self._main, name=f"executor-{name}", daemon=True)

    @property
    def plans(self) -> list[Plan]:
        """Every plan that came to be run, in order."""
        return self.runner.plans

    @property
    def epochs(self) -> list[int]:
        return self.link.epochs

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> Self:
        self._thread.start()
        return self

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()

    def hold(self) -> None:
        """The next plans wait, computed by nobody, until `release`."""
        self.runner.hold()

    def release(self, count: int | None = None) -> None:
        """Let `count` plans through (None: all, from now on)."""
        self.runner.release(count)

    def wait_plans(self, count: int, timeout_s: float = 60.0) -> list[Plan]:
        """Wait until `count` plans have come in all (those held included). Raises TimeoutError."""
        self.runner.wait_plans(count, timeout_s)
        return self.plans

    def wait_attached(self, count: int = 1, timeout_s: float = 60.0) -> int:
        """Wait until it was welcomed `count` times; returns the epoch. Raises TimeoutError."""
        with self.link.changed:
            if not self.link.changed.wait_for(lambda: len(self.epochs) >= count, timeout_s):
                raise TimeoutError(f"{self.name} was welcomed {len(self.epochs)} times, not {count}: {self.error!r}")
            return self.epochs[-1]

    def send_raw(self, *frames: bytes) -> None:
        """Send frames to the scheduler as they are."""
        self.link.send_raw(*frames)

    def stop(self, reason: str = "stop", wait_s: float = 15.0) -> None:
        """Ask to leave, and wait for the end."""
        self.link.request_stop(reason)
        self._join(wait_s)

    def kill(self) -> None:
        """End at once without a word."""
        self.runner.die()
        self.link.abandon()
        if self._thread.ident is not None:
            self._join(15.0)

    def join(self, wait_s: float = 15.0) -> None:
        """Wait for the thread to end by itself. Raises TimeoutError."""
        self._join(wait_s)

    def _join(self, wait_s: float) -> None:
        self._thread.join(wait_s)
        if self._thread.is_alive():
            raise TimeoutError(f"{self.name} did not end within {wait_s} s")

    def _main(self) -> None:
        try:
            self.link.run()
        except Dead:
            pass
        except BaseException as error:
            self.error = error
            traceback.print_exception(error)  # or a test would only see that nothing happens
        finally:
            with self.link.changed:
                self.link.changed.notify_all()


class FakeSettings(ServiceSettings):
    """Flags of `python -m executor_svc.fake`."""

    table: ClassVar[str] = "fake"

    scheduler: str = Field("tcp://127.0.0.1:5570", description="address of the scheduler, tcp:// or ipc://")
    name: str = Field(default_factory=lambda: f"fake-{os.getpid()}", description="name of this executor")
    model: Path = Field(
        DEFAULT_MODEL, description="folder with tokenizer files; without tokenizer.json an invented one"
    )
    served_model_name: str = Field("", description="name of the model; empty: the folder's, or fake")
    fingerprint: str = Field("", description="32 hexadecimal digits; empty: derived from the name")
    vocab_size: int = Field(512, ge=2, description="of an invented model")
    max_model_len: int = Field(2048, ge=1, description="of an invented model")
    eos_ids: list[int] = Field([0], description="of an invented model")
    block_size: int = Field(16, ge=1)
    num_blocks: int = Field(1024, ge=1)
    num_host_blocks: int = Field(0, ge=0)
    max_num_seqs: int = Field(64, ge=1)
    max_num_batched_tokens: int = Field(2048, ge=1)
    spare: bool = Field(False, description="take sequences only while no other executor of the model does")
    delay_ms: float = Field(0.0, ge=0, description="milliseconds an iteration takes, over the script's")
    script: Path | None = Field(None, description="JSON file with the script, read at the start and at SIGHUP")
    verify: bool = Field(True, description="check every row's whole context")
    scheduler_timeout_s: float = Field(5.0, gt=0)
    hello_interval_s: float = Field(1.0, gt=0)
    grace_s: float = Field(10.0, ge=0)
    transfer_bind: str = Field("", description="address where other executors read its KV; without it none do")

    def card(self) -> ModelCard:
        fingerprint = bytes.fromhex(self.fingerprint) if self.fingerprint else None
        if (self.model / "tokenizer.json").is_file():
            return card_from_folder(self.model, self.served_model_name or None, fingerprint)
        return invented_card(
            self.served_model_name or "fake",
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            eos_ids=tuple(self.eos_ids),
            fingerprint=fingerprint,
        )

    def read_script(self, card: ModelCard) -> Script:
        """Raises OSError, and ValueError naming what is wrong."""
        script = Script.from_json(self.script.read_text()) if self.script else Script()
        script.delay_s = self.delay_ms / 1000 or script.delay_s
        script.alphabet = script.alphabet or readable_tokens(card)
        return script

    def limits(self) -> Limits:
        return Limits(
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            num_host_blocks=self.num_host_blocks,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
        )


def main(arguments: list[str] | None = None) -> int:
    """Run one scripted executor until it is drained, stopped, or dies by its script."""
    settings = FakeSettings.from_command_line(arguments, prog="python -m executor_svc.fake")
    configure_logs("fake", settings.log_format, settings.log_level)
    card = settings.card()
    fake = FakeExecutor(
        settings.scheduler,
        settings.read_script(card),
        name=settings.name,
        model=card,
        limits=settings.limits(),
        spare=settings.spare,
        scheduler_timeout_s=settings.scheduler_timeout_s,
        grace_s=settings.grace_s,
        hello_interval_s=settings.hello_interval_s,
        verify=settings.verify,
        record_plans=False,
        on_death=lambda: os._exit(9),
        transfer_bind=settings.transfer_bind,
    )
    install_signal_handlers(fake.link)
    signal.signal(signal.SIGHUP, lambda _number, _frame: fake.runner.follow(settings.read_script(card)))
    try:
        fake.link.run()
    except RefusedError as error:
        print(f"error: the scheduler refused this executor: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
