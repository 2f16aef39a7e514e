"""The formats that models write calls in."""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence

from scheduler_svc.frontend.parsing.call_parser import CallParser
from scheduler_svc.frontend.parsing.json_call import JsonCall, MistralCall

_ALPHANUMERIC = string.ascii_letters + string.digits


def call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def short_call_id() -> str:
    """Nine letters and digits: templates of Mistral's models refuse others when the call comes back."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


class HermesParser(CallParser):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, one for each call: Hermes, Qwen 2.5, Qwen 3."""

    start, end = "<tool_call>", "</tool_call>"
    special = (start, end)
    """Markup that may be special tokens of the tokenizer."""

    def __init__(self, _names: frozenset[str], parallel: bool, allowed: frozenset[str] | None = None) -> None:
        super().__init__(call_id, parallel, allowed)
        self._is_open = False
        """The end of the last call is still to come."""

    def _markers(self) -> Sequence[str]:
        return (self.start, self.end) if self._is_open else (self.start,)

    def _meet(self, marker: str) -> JsonCall | None:
        self._is_open = False
        return JsonCall() if marker == self.start else None

    def _call_ended(self, call: JsonCall) -> None:
        self._is_open = not self._is_barred

    def _is_cut_end(self, rest: str) -> bool:
        return self._is_open and self.end.startswith(rest)


class Llama3Parser(CallParser):
    """`{"name": …, "parameters": {…}}`, after `<|python_tag|>` or as the first text of a message; more after `;`.

    Without the tag it may be an answer in JSON: it is a call only if it names one of the request's tools.
    """

    tag = "<|python_tag|>"
    special = (tag,)
    separators = CallParser.separators + ";"

    def __init__(self, names: frozenset[str], parallel: bool, allowed: frozenset[str] | None = None) -> None:
        super().__init__(call_id, parallel, allowed)
        self._names = names

    def _markers(self) -> Sequence[str]:
        return (self.tag,)

    def _meet(self, marker: str) -> JsonCall | None:
        return JsonCall(needs_arguments=True)

    def _after_gap(self, character: str) -> JsonCall | None:
        return JsonCall(self._names, needs_arguments=True) if character == "{" else None


class MistralParser(CallParser):
    """`[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]`, or of newer models `[TOOL_CALLS]name{…}` for each call."""

    start = "[TOOL_CALLS]"
    special = (start, "[ARGS]", "[CALL_ID]")
    separators = CallParser.separators + ","

    def __init__(self, _names: frozenset[str], parallel: bool, allowed: frozenset[str] | None = None) -> None:
        super().__init__(short_call_id, parallel, allowed)
        self._in_array = False

    def _markers(self) -> Sequence[str]:
        return (self.start,)

    def _meet(self, marker: str) -> JsonCall | None:
        return MistralCall()

    def _after_gap(self, character: str) -> JsonCall | None:
        return JsonCall() if self._in_array and character == "{" else None

    def _closes(self, character: str) -> bool:
        closes = self._in_array and character == "]"
        self._in_array = self._in_array and not closes
        return closes

    def _call_ended(self, call: JsonCall) -> None:
        if isinstance(call, MistralCall):
            self._in_array = call.in_array


class ForcedParser(CallParser):
    """`[{"name": …, "parameters": {…}}, …]` and nothing else: what the grammar of a forced choice allows."""

    separators = CallParser.separators + "[,]"

    def _markers(self) -> Sequence[str]:
        return ()

    def _after_gap(self, character: str) -> JsonCall | None:
        return JsonCall() if character == "{" else None
