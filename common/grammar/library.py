"""xgrammar's native objects, loaded without torch and transformers.

The package's own `__init__` imports both, for helpers that are not used here; the scheduler service has neither. So
the package is entered under its name without being run, and its bindings are imported from it. They are no public
interface: the version is pinned.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
import types
from typing import Any

_lock = threading.Lock()


class GrammarsUnavailable(Exception):
    """xgrammar is not installed, or cannot be loaded."""


def bindings() -> Any:
    """The namespace of `GrammarCompiler`, `GrammarMatcher`, `TokenizerInfo`. Raises `GrammarsUnavailable`."""
    with _lock:
        try:
            if "xgrammar" not in sys.modules:
                _enter()
            importlib.import_module("xgrammar.load_binding")
            return importlib.import_module("xgrammar.base")._core
        except (ImportError, OSError, AttributeError) as error:
            raise GrammarsUnavailable(f"xgrammar cannot be loaded: {error}") from error


def _enter() -> None:
    spec = importlib.util.find_spec("xgrammar")
    if spec is None or spec.submodule_search_locations is None:
        raise ImportError("it is not installed")
    package = types.ModuleType("xgrammar")
    package.__path__ = list(spec.submodule_search_locations)
    package.__spec__ = spec  # who asks whether it is installed is told so
    sys.modules["xgrammar"] = package
