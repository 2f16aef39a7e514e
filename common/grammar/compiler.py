"""From the text of a grammar to what tells, token by token, how a text may go on."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.grammar.library import bindings
from common.grammar.vocabulary import vocabulary_bytes
from common.wire import Language

_RAW = 0
"""xgrammar's kind of vocabulary whose entries are the bytes themselves."""
MAX_SPACES = 8
"""White space between two tokens of JSON: a weak model that may write more of it can do so for ever."""
_ORIGIN = re.compile(r"^\[[0-9:]+\] \S+: *(?:Warning: )?(?:Check failed: \(.*?\) is false: )?")


class GrammarError(ValueError):
    """The source is no grammar, or one that xgrammar does not support."""


class GrammarCompiler:
    """Compiles for one vocabulary. Safe to use from several threads, which do not wait for each other."""

    def __init__(self, tokenizer_json: bytes, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        """`eos_ids`: what may end a text where its grammar may. Raises `GrammarsUnavailable`."""
        self._core = bindings()
        vocabulary = vocabulary_bytes(tokenizer_json, vocab_size)
        self._words = -(-vocab_size // 32)
        info = self._core.TokenizerInfo(vocabulary, _RAW, vocab_size, list(eos_ids), False)
        self._compiler = self._core.GrammarCompiler(info, 1, False, -1, False)

    def compile(self, language: int, source: str) -> CompiledGrammar:
        """Takes milliseconds to many seconds, without the interpreter lock. Raises `GrammarError`."""
        compiler = self._compiler
        try:
            match language:
                case Language.JSON_SCHEMA | Language.JSON_SCHEMA_COMPACT:
                    spaces = language == Language.JSON_SCHEMA
                    compiled = compiler.compile_json_schema(source, spaces, None, None, True, MAX_SPACES, False)
                case Language.REGEX:
                    compiled = compiler.compile_regex(source)
                case Language.EBNF:
                    compiled = compiler.compile_grammar_from_strings(source, "root")
                case _:
                    raise GrammarError(f"no language of grammars has the number {language}")
        except (RuntimeError, ValueError, TypeError) as error:
            raise GrammarError(plain_message(str(error))) from error
        return CompiledGrammar(self._core, compiled, self._words)


class CompiledGrammar:
    """A grammar ready for use by any number of sequences."""

    def __init__(self, core: Any, compiled: Any, num_words: int) -> None:
        self._core, self._compiled, self._num_words = core, compiled, num_words
        self.size_bytes = int(compiled.memory_size_bytes())

    def matcher(self) -> Matcher:
        """A matcher at the beginning of a text."""
        return Matcher(self._core.GrammarMatcher(self._compiled, None, False, -1, None), self._num_words)


class Matcher:
    """Where one text stands in its grammar. Not safe for two threads at a time."""

    def __init__(self, matcher: Any, num_words: int) -> None:
        self._matcher, self._num_words = matcher, num_words

    def accept(self, token: int) -> bool:
        """Go on by a token. False where the grammar does not allow it; then nothing has changed."""
        return bool(self._matcher.accept_token(token, False))

    def allowed(self) -> NDArray[np.int32]:
        """int32 [ceil(V / 32)]: bit i % 32 of word i // 32 says whether token i may come next."""
        words: NDArray[np.int32] = np.full(self._num_words, -1, np.int32)
        if self._matcher.is_terminated():
            words[:] = 0
        else:
            self._matcher.fill_next_token_bitmask(words[None], 0, False)
        return words


def plain_message(text: str) -> str:
    """What xgrammar says, without the place in its source."""
    lines = [_ORIGIN.sub("", line).strip() for line in text.splitlines()]
    return " ".join(line for line in lines if line)[:500] or "it cannot be compiled"
