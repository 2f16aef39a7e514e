"""Which format a model's text has: what the settings say, or what its chat template tells."""

from __future__ import annotations

from collections.abc import Callable

from scheduler_svc.frontend.parsing.call_parser import CallParser
from scheduler_svc.frontend.parsing.formats import (
    ForcedParser,
    HermesParser,
    Llama3Parser,
    MistralParser,
    call_id,
    short_call_id,
)
from scheduler_svc.frontend.parsing.marked_reasoning import Marks
from scheduler_svc.frontend.parsing.reasoning import THINK, THINK_END

FORMATS: dict[str, type[HermesParser | Llama3Parser | MistralParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3Parser,
    "mistral": MistralParser,
}
TOLD_BY = {
    "hermes": (HermesParser.start,),
    "mistral": (MistralParser.start,),
    "llama3_json": (Llama3Parser.tag, '"parameters": dictionary of argument name'),
}
"""What a chat template holds that writes calls in a format, or asks for it in words."""
OTHERS = ("<function=", "<arg_key>", "<|python_start|>")
"""Formats that share a marker with one of these, and are none of them."""


def tool_call_format(setting: str, template: str) -> str | None:
    """A name in `FORMATS`; `none` where the setting says so; None where the template does not tell."""
    if setting != "auto":
        return setting
    if any(mark in template for mark in OTHERS):
        return None
    return next((name for name, marks in TOLD_BY.items() if any(mark in template for mark in marks)), None)


def call_parser(
    name: str, names: frozenset[str], *, parallel: bool, allowed: frozenset[str] | None = None
) -> CallParser:
    """A parser for one message. `names`: of the request's tools; `allowed`: of those that may be called, unless all."""
    return FORMATS[name](names, parallel, allowed)


def forced_parser(name: str | None, *, parallel: bool) -> CallParser:
    """A parser for one message that has to be calls. `name`: of the model's own format, which may be unknown."""
    return ForcedParser(short_call_id if name == "mistral" else call_id, parallel)


def splits_reasoning(setting: str, template: str) -> bool:
    """Whether answers are looked through for reasoning."""
    return setting == "think" or (setting == "auto" and THINK_END in template)


def opens_reasoning(prompt: str, own: str | None) -> bool:
    """Whether a rendered prompt ends within the reasoning. What others say in it does not count.

    `own`: the beginning of the model's answer, with which the prompt ends; None: the answer is still to begin.
    """
    own = "" if own is None else own.strip()
    if THINK_END in own:
        return False
    return own.startswith(THINK) or prompt.rstrip().removesuffix(own).rstrip().endswith(THINK)


def reasoning_marks(prompt: str, own: str | None, token_id: Callable[[str], int | None]) -> Marks | None:
    """Of the reasoning that may come before an answer under a grammar; None: the answer begins at once.

    It does where the prompt ends behind the reasoning, or within the model's own answer; and where a marker that is
    still to come is no token of the vocabulary: it could be spelled in many ways. `prompt`, `own`: as for
    `opens_reasoning`.
    """
    end = token_id(THINK_END)
    if end is None:
        return None
    if opens_reasoning(prompt, own):
        return Marks(None, end)
    start = token_id(THINK)
    if own is not None or start is None or prompt.rstrip().endswith(THINK_END):
        return None
    return Marks(start, end)
