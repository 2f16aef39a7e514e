"""Grammars that bound a text, compiled for a model's vocabulary with the library xgrammar (Dong et al., 2024)."""

from common.grammar.compiler import CompiledGrammar, GrammarCompiler, GrammarError, Matcher
from common.grammar.library import GrammarsUnavailable

__all__ = ["CompiledGrammar", "GrammarCompiler", "GrammarError", "GrammarsUnavailable", "Matcher"]
