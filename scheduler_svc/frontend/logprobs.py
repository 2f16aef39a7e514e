"""Logprobs in the shapes of both APIs. Values are natural logs of the raw model distribution, before temperature."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Protocol

import orjson

from scheduler_svc.frontend.output import Entry
from scheduler_svc.frontend.tokenizer import Tokenizer

FLOOR = -9999.0
"""Stands for minus infinity and NaN, which JSON cannot carry."""


def finite(value: float) -> float:
    return value if math.isfinite(value) else FLOOR


class LogprobWriter:
    """Writes entries for one request: `top` is how many alternatives it asked for."""

    def __init__(self, tokenizer: Tokenizer, top: int, skip_special_tokens: bool, as_ids: bool = False) -> None:
        """`as_ids`: tokens are named `token_id:5`."""
        self._tokenizer, self._top, self._skip_special_tokens = tokenizer, top, skip_special_tokens
        self._as_ids = as_ids
        self._strings: dict[int, str] = {}
        self._bytes: dict[int, list[int]] = {}
        """Of the tokens that were written: the same few come again and again."""

    def token_string(self, token: int) -> str:
        """The token's text; `bytes:\\xe4\\xb8` for one that is no whole UTF-8 text of its own."""
        if self._as_ids:
            return f"token_id:{token}"
        text = self._strings.get(token)
        if text is None:
            text = self._strings[token] = _as_text(self._tokenizer.detokenizers.token_bytes(token))
        return text

    def chat(self, entries: Iterable[Entry]) -> list[dict[str, Any]]:
        """`choices[].logprobs.content`. `bytes` are what the token adds to the text; none for one that is not shown."""
        return [self._chat_entry(entry) for entry in entries]

    def _chat_entry(self, entry: Entry) -> dict[str, Any]:
        ids, values = entry.scores or ([], [])
        top = zip(ids[1 : 1 + self._top], values[1 : 1 + self._top], strict=False)
        own = self._chat_token(entry.token, values[0] if values else FLOOR)
        if not entry.shown:
            own["bytes"] = []
        return {**own, "top_logprobs": [self._chat_token(token, value) for token, value in top]}

    def _chat_token(self, token: int, value: float) -> dict[str, Any]:
        data = self._bytes.get(token)
        if data is None:
            data = self._bytes[token] = list(self._tokenizer.detokenizers.token_bytes(token, self._skip_special_tokens))
        return {"token": self.token_string(token), "logprob": finite(value), "bytes": data}

    def completion(self, entries: Iterable[Entry]) -> dict[str, Any]:
        """`choices[].logprobs` of the completions API. An entry without scores (a prompt's first one) gives nulls."""
        tokens, values, tops, offsets = [], [], [], []
        for entry in entries:
            tokens.append(self.token_string(entry.token))
            offsets.append(entry.offset)
            values.append(None if entry.scores is None else finite(entry.scores[1][0]))
            tops.append(None if entry.scores is None else self._top_map(*entry.scores))
        return {"text_offset": offsets, "token_logprobs": values, "tokens": tokens, "top_logprobs": tops}

    def _top_map(self, ids: list[int], values: list[float]) -> dict[str, float]:
        """The most likely tokens, and the chosen one where it is not among them."""
        top: dict[str, float] = {}
        for token, value in zip(ids[1 : 1 + self._top], values[1 : 1 + self._top], strict=False):
            top.setdefault(self.token_string(token), finite(value))
        top.setdefault(self.token_string(ids[0]), finite(values[0]))
        return top


class GatheredLogprobs(Protocol):
    """The `logprobs` of a choice, put together from those of its parts."""

    def add(self, part: dict[str, Any]) -> None:
        """The next part, of one entry or more."""

    def value(self) -> Any:
        """Of the choice; the last that is asked for."""


class JoinedLogprobs:
    """Lists that grow.

    Each part becomes JSON as it comes: as objects, those of a long answer would take several times the memory.
    """

    def __init__(self, empty: dict[str, Any]) -> None:
        """`empty`: as of no entry at all; its lists are those that grow."""
        self._others = {name: value for name, value in empty.items() if type(value) is not list}
        self._lists: dict[str, list[bytes]] = {name: [] for name in empty if name not in self._others}

    def add(self, part: dict[str, Any]) -> None:
        """The next part, of one entry or more."""
        for name, items in self._lists.items():
            items.append(orjson.dumps(part[name])[1:-1])

    def value(self) -> dict[str, Any]:
        """For `orjson.dumps`. The parts are gone then."""
        lists = {name: orjson.Fragment(b"[%b]" % b",".join(self._lists.pop(name))) for name in list(self._lists)}
        return {**lists, **self._others}


def _as_text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
