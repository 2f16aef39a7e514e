"""Saves work that the interpreter repeats: it prepares Triton's language again at every call between jit functions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


@contextlib.contextmanager
def patched_once_a_launch() -> Iterator[None]:
    """Inside, a launch prepares each module of the language once, whichever function of the kernel asks for it."""
    patch, call = interpreter._patch_lang, interpreter.GridExecutor.__call__
    prepared: set[bool] = set()

    def patch_once(function: Any) -> Any:
        standard = any(value is tl.core for value in function.__globals__.values())
        if standard in prepared:
            return interpreter._LangPatchScope()
        prepared.add(standard)
        return patch(function)

    def call_afresh(self: Any, *arguments: Any, **options: Any) -> Any:
        prepared.clear()
        return call(self, *arguments, **options)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, call_afresh
    try:
        yield
    finally:
        interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch, call
