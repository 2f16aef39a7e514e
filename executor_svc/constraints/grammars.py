"""Compiled grammars, made in threads of their own and kept while there is room."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor

import structlog

from common.grammar import CompiledGrammar, GrammarCompiler, GrammarError, GrammarsUnavailable
from common.wire import Constraint, ModelCard

log = structlog.get_logger()

MAX_GRAMMARS = 512
MAX_BYTES = 256 << 20
"""Of all grammars kept, by xgrammar's own count. A sequence keeps its own beyond that, for as long as it runs."""


class Grammars:
    """The grammars of one model. The tokenizer is read when the first one is wanted."""

    def __init__(self, card: ModelCard, max_grammars: int = MAX_GRAMMARS, max_bytes: int = MAX_BYTES) -> None:
        self._card, self._max_grammars, self._max_bytes = card, max_grammars, max_bytes
        self._kept: OrderedDict[bytes, Future[CompiledGrammar]] = OrderedDict()
        """By the hash of their source, the least recently used first."""
        self._pool = ThreadPoolExecutor(2, "grammar", initializer=yield_to_the_model)
        self._lock = threading.Lock()
        self._compiler: GrammarCompiler | None = None

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, constraint: Constraint) -> Future[CompiledGrammar]:
        """The grammar, or the promise of it. It ends with `GrammarError` or `GrammarsUnavailable` where there is none.

        Called in one thread only.
        """
        key = hashlib.blake2b(b"%d " % constraint.language + constraint.source.encode(), digest_size=16).digest()
        found = self._kept.get(key)
        if found is None:
            found = self._kept[key] = self._pool.submit(self._compile, constraint.language, constraint.source)
        self._kept.move_to_end(key)
        self._evict()
        return found

    def _compile(self, language: int, source: str) -> CompiledGrammar:
        try:
            return self._ready_compiler().compile(language, source)
        except (GrammarError, GrammarsUnavailable) as error:
            log.warning("a grammar cannot be compiled", error=str(error))
            raise

    def _ready_compiler(self) -> GrammarCompiler:
        with self._lock:
            if self._compiler is None:
                card = self._card
                tokenizer = card.tokenizer_files.get("tokenizer.json")
                if tokenizer is None:
                    raise GrammarsUnavailable("the model brings no tokenizer.json")
                self._compiler = GrammarCompiler(tokenizer, card.vocab_size, card.eos_ids)
            return self._compiler

    def _evict(self) -> None:
        while len(self._kept) > 1 and (len(self._kept) > self._max_grammars or self._size() > self._max_bytes):
            self._kept.popitem(last=False)

    def _size(self) -> int:
        done = (kept for kept in self._kept.values() if kept.done() and kept.exception() is None)
        return sum(kept.result().size_bytes for kept in done)


def yield_to_the_model() -> None:
    """Let this thread have what the forward pass leaves of the processors (on Linux a thread has its own niceness)."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
