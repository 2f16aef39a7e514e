"""One sequence under a constraint."""

from __future__ import annotations

import time
from concurrent.futures import Executor, Future
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from common.grammar import CompiledGrammar, GrammarError, GrammarsUnavailable, Matcher
from common.wire import Constraint
from executor_svc.constraints.reasoning import Reasoning

Words = NDArray[np.int32]

INLINE_TOKENS = 64
"""More tokens than these are followed in a thread: a sequence that is resumed brings all that it has said."""
SLOW_S = 1e-3
"""A step that took longer sends the next one to a thread. A usual step takes some 50 µs."""
MAX_STEP_S = 2.0
"""Processor time: a grammar whose steps take longer (they grow with the text where it is ambiguous) cannot go on."""


class Step(Enum):
    """Where a row stands before its draw."""

    READY = 0
    NOT_READY = 1
    STUCK = 2
    """No token can follow."""


class Vocabulary:
    """Sets of tokens that are the same for every row, as bits. Nobody writes to them."""

    def __init__(self, size: int, eos_ids: NDArray[np.integer]) -> None:
        """`size`: token ids are below it."""
        self.size = size
        self.all = words_of(np.arange(size), size)
        self.not_eos = self.all & ~words_of(eos_ids, size)
        """What may come within reasoning, which EOS does not end."""


class Row:
    """Follows the tokens that its sequence has generated. What takes long is done in `pool`, a little at a time."""

    def __init__(
        self,
        constraint: Constraint,
        grammar: Future[CompiledGrammar] | None,
        ends: Words,
        vocabulary: Vocabulary,
        pool: Executor,
    ) -> None:
        """ends: the tokens that may not come before the sequence has its `min_tokens`, as bits."""
        self._grammar, self._ends, self._pool = grammar, ends, pool
        self._fixed = words_of(constraint.allowed_ids, vocabulary.size) if len(constraint.allowed_ids) else None
        self._reasoning, self._thinking = Reasoning(constraint), vocabulary.not_eos
        self._bad = np.split(constraint.bad_ids, np.cumsum(constraint.bad_widths.astype(np.int64))[:-1])
        self._matcher: Matcher | None = None
        self._followed, self._allowed, self._known_at = 0, vocabulary.all, -1
        """Tokens that the matcher has gone by; what it allows next, once `_known_at` tokens are generated."""
        self._slow = self._dead = False
        self._job: Future[None] | None = None

    @property
    def waits_for(self) -> Future[CompiledGrammar] | Future[None] | None:
        """What has to be done before it is ready, where that is under way."""
        if self._job is not None and not self._job.done():
            return self._job
        return self._grammar if self._grammar is not None and not self._grammar.done() else None

    @property
    def is_slow(self) -> bool:
        """Whether its steps are taken in a thread."""
        return self._slow

    def step(self, generated: NDArray[np.int32]) -> Step:
        """Bring it up to date with the tokens that its sequence has generated."""
        if self._grammar is None or self._known_at == len(generated):
            return self._outcome()
        before = self._reasoning.length(generated)
        if before is None:
            return Step.READY
        if self.waits_for is not None:
            return Step.NOT_READY
        if self._job is not None:
            self._job.result()
            self._job = None
        self._followed = max(self._followed, before)
        if not self._dead and self._known_at != len(generated):
            if not self._slow and len(generated) - self._followed <= INLINE_TOKENS:
                self._follow(generated)
            else:
                self._job = self._pool.submit(self._follow, generated.copy())
                return Step.NOT_READY
        return self._outcome()

    def _outcome(self) -> Step:
        return Step.STUCK if self._dead else Step.READY

    def _follow(self, generated: NDArray[np.int32]) -> None:
        assert self._grammar is not None
        began = time.thread_time()
        try:
            if self._matcher is None:
                self._matcher = self._grammar.result().matcher()
            for token in generated[self._followed :].tolist():
                if not self._matcher.accept(token):
                    self._dead = True
                    break
                self._followed += 1
            self._allowed = self._matcher.allowed()
        except (GrammarError, GrammarsUnavailable, RuntimeError):
            self._dead = True
        self._known_at = len(generated)
        took = time.thread_time() - began
        self._slow, self._dead = took > SLOW_S, self._dead or took > MAX_STEP_S

    def mask(self, generated: NDArray[np.int32], *, young: bool) -> Words:
        """The tokens that may come now, as bits; empty bits: none. It must be ready.

        The grammar and the allowed tokens go before bad words and before `min_tokens` (`young`: it has fewer): where
        those would leave no token, they do not count.
        """
        words = self._unfixed(generated)
        if self._fixed is not None:
            words = words & self._fixed
        if young:
            words = _unless_empty(words & ~self._ends, words)
        banned = [run[-1] for run in self._bad if self._comes_next(run, generated)]
        if banned:
            without = words.copy()
            for token in banned:
                without[token // 32] &= ~np.int32(_BITS[token % 32])
            words = _unless_empty(without, words)
        return words

    def _unfixed(self, generated: NDArray[np.int32]) -> Words:
        """What the grammar allows; or, within reasoning, all that does not end the sequence."""
        if self._reasoning.length(generated) is None:
            return self._thinking
        if self._reasoning.start is None or len(generated):
            return self._allowed
        words = self._allowed.copy()
        words[self._reasoning.start // 32] |= _BITS[self._reasoning.start % 32]
        return words

    @staticmethod
    def _comes_next(run: NDArray[np.int32], generated: NDArray[np.int32]) -> bool:
        """Whether one more token would complete the run."""
        before = len(run) - 1
        if not 0 <= before <= len(generated):
            return False
        return np.array_equal(run[:-1], generated[len(generated) - before :])


def _unless_empty(words: Words, otherwise: Words) -> Words:
    return words if words.any() else otherwise


_BITS = np.left_shift(np.uint32(1), np.arange(32, dtype=np.uint32)).view(np.int32)


def words_of(tokens: NDArray[np.integer], vocab_size: int) -> Words:
    """int32 [ceil(V / 32)] with the bits of these tokens."""
    bits = np.zeros(-(-vocab_size // 32) * 32, bool)
    bits[tokens] = True
    return np.packbits(bits, bitorder="little").view(np.int32)
