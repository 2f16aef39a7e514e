"""Whether grammars compile, tried in processes of their own before a request goes to the core."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import socket
import subprocess
import sys
import threading
from collections import OrderedDict
from functools import partial

import msgpack
import structlog

from common.grammar.library import GrammarsUnavailable
from common.wire import ModelCard
from scheduler_svc.frontend.constraints.fields import Grammar
from scheduler_svc.frontend.constraints.worker import BEGUN, MAX_WALL_S, receive, send
from scheduler_svc.frontend.prompts import run_in_pool
from scheduler_svc.frontend.streams import Generation
from scheduler_svc.frontend.text_threads import TextThreads

log = structlog.get_logger()

QUICK_CPU_S = 1
"""Seconds of a processor for a first try. What takes longer is tried again, one at a time."""
CHECKS = 4
"""First tries at a time."""
MAX_VERDICTS = 4096
MAX_WORKERS = 4
"""Models whose processes stay, those asked for last."""
START_S = 60.0

ModelKey = tuple[bytes, int, tuple[int, ...]]


class GrammarChecker:
    """Verdicts on grammars, kept. The process of a model starts with the first grammar for it."""

    def __init__(self, max_cpu_s: int) -> None:
        """max_cpu_s: seconds of a processor that a grammar may take."""
        self._max_cpu_s = max_cpu_s
        self._threads = TextThreads(CHECKS)
        self._lock = threading.Lock()
        self._workers: OrderedDict[ModelKey, Worker] = OrderedDict()
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()

    def close(self) -> None:
        self._threads.shutdown()
        with self._lock:
            for worker in self._workers.values():
                worker.close()
            self._workers.clear()

    async def verdict(self, card: ModelCard, grammar: Grammar, generation: Generation) -> str:
        """What is wrong with a grammar; empty: nothing. Raises `GrammarsUnavailable`."""
        key = _model_key(card)
        told = b"%d %d " % (grammar.language, grammar.lenient) + grammar.source.encode()
        place = hashlib.blake2b(told, key=hashlib.blake2b(repr(key).encode()).digest(), digest_size=16).digest()
        verdict = self._verdicts.get(place)
        if verdict is None:
            tried = partial(self._try, key, card, grammar)
            verdict = await run_in_pool(self._threads, generation, partial(tried, QUICK_CPU_S), doubtful=False)
            if verdict is None and self._max_cpu_s > QUICK_CPU_S:
                verdict = await run_in_pool(self._threads, generation, partial(tried, self._max_cpu_s), doubtful=True)
            if verdict is None:
                verdict = f"it takes more than {self._max_cpu_s} s of a processor, or too much memory, to compile"
            self._verdicts[place] = verdict
            if len(self._verdicts) > MAX_VERDICTS:
                self._verdicts.popitem(last=False)
        self._verdicts.move_to_end(place)
        return verdict

    def _try(self, key: ModelKey, card: ModelCard, grammar: Grammar, cpu_s: int) -> str | None:
        """In a thread. None: its time or its memory was over. Raises `GrammarsUnavailable`."""
        try:
            return self._worker(key, card).ask(grammar, cpu_s)
        except WorkerEnded:  # somebody has killed it
            return self._worker(key, card).ask(grammar, cpu_s)

    def _worker(self, key: ModelKey, card: ModelCard) -> Worker:
        with self._lock:
            worker = self._workers.get(key)
            if worker is None or not worker.alive:
                worker = self._workers[key] = Worker(card)
            self._workers.move_to_end(key)
            if len(self._workers) > MAX_WORKERS:
                self._workers.popitem(last=False)[1].close()
            return worker


def _model_key(card: ModelCard) -> ModelKey:
    """What a compiled grammar depends on."""
    tokenizer = card.tokenizer_files["tokenizer.json"]
    return hashlib.blake2b(tokenizer, digest_size=16).digest(), card.vocab_size, card.eos_ids


class WorkerEnded(GrammarsUnavailable):
    """The process has been killed from outside."""


class Worker:
    """The process for one model. Safe to use from several threads."""

    def __init__(self, card: ModelCard) -> None:
        """Waits until it is up. Raises `GrammarsUnavailable`."""
        if importlib.util.find_spec("xgrammar") is None:
            raise GrammarsUnavailable("the library xgrammar is not installed here")
        self._control, theirs = socket.socketpair()
        self._sending, self._ended = threading.Lock(), False
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "scheduler_svc.frontend.constraints.worker"],
                stdin=theirs.fileno(),
                env=environment,
            )
        self._control.settimeout(START_S)
        try:
            vocabulary = (card.tokenizer_files["tokenizer.json"], card.vocab_size, list(card.eos_ids))
            send(self._control, msgpack.packb(vocabulary))
            up = self._control.recv(1)
        except OSError:
            up = b""
        if not up:
            self.close()
            raise GrammarsUnavailable("the process that tries grammars does not start")
        log.info("grammars can be tried", model=card.name, pid=self._process.pid)

    @property
    def alive(self) -> bool:
        return not self._ended and self._process.poll() is None

    def ask(self, grammar: Grammar, cpu_s: int) -> str | None:
        """The verdict on a grammar; None: its time or its memory was over. Raises `WorkerEnded`."""
        ours, theirs = socket.socketpair()
        with ours:
            ours.settimeout(2 * MAX_WALL_S)
            try:
                with theirs, self._sending:
                    socket.send_fds(self._control, [b"\0"], [theirs.fileno()])
                begun = ours.recv(len(BEGUN))
            except OSError:
                begun = b""
            if not begun:
                self._ended = True
                raise WorkerEnded("the process that tries grammars has ended")
            try:
                send(ours, msgpack.packb((int(grammar.language), grammar.source, grammar.lenient, cpu_s)))
                answer = receive(ours)
            except OSError:
                answer = None
        return None if answer is None else answer.decode()

    def close(self) -> None:
        """The process ends as its socket does."""
        self._control.close()
        self._process.terminate()
        self._process.wait()
