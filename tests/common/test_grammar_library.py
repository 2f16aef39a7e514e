"""xgrammar's library without the packages that it would import."""

from __future__ import annotations

import importlib.util
import sys

from common.grammar.library import bindings


def test_its_package_is_found_before_and_after() -> None:
    """Whoever asks whether it is installed, in the process that has it loaded."""
    assert importlib.util.find_spec("xgrammar") is not None
    assert bindings().GrammarCompiler
    spec = importlib.util.find_spec("xgrammar")
    assert spec is not None and spec is sys.modules["xgrammar"].__spec__
