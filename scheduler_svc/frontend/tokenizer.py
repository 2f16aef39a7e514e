"""A model's tokenizer, built from the files that an executor brought, encoding as `transformers` would.

Whether a BOS is added to a text is for tokenizer.json to say; `add_bos_token` beside it counts nothing, as there.
"""

from __future__ import annotations

from typing import Any

import orjson
import tokenizers

from scheduler_svc.frontend.detokenizer import DetokenizerFactory

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenizerError(Exception):
    """The tokenizer files cannot be used."""


class TooManyTokens(Exception):
    """A text has more tokens than it may."""

    def __init__(self, count: int) -> None:
        super().__init__(f"{count} tokens")
        self.count = count


class Tokenizer:
    """Text to ids and back. Safe to use from several threads at once."""

    def __init__(self, files: dict[str, bytes]) -> None:
        if "tokenizer.json" not in files:
            raise TokenizerError("the model brings no tokenizer.json")
        self.config = _json_object(files, "tokenizer_config.json")
        self.special_tokens = _special_tokens(self.config, _json_object(files, "special_tokens_map.json"))
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(files["tokenizer.json"])
            self._prepare()
        except Exception as error:  # the library raises bare Exceptions
            raise TokenizerError(f"tokenizer.json cannot be read: {error}") from error
        self.detokenizers = DetokenizerFactory(self._tokenizer)
        self.longest_token = max(map(len, self._tokenizer.get_vocab()), default=1)
        """Characters of the longest vocabulary entry; bytes, for byte-level ones."""

    def _prepare(self) -> None:
        tokenizer = self._tokenizer
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = bool(self.config.get("split_special_tokens", False))
        named = [t for t in self.special_tokens.values() if isinstance(t, str) and tokenizer.token_to_id(t) is not None]
        tokenizer.add_special_tokens([tokenizers.AddedToken(t, special=True, normalized=False) for t in named])

    def encode(self, text: str, add_special_tokens: bool, limit: int | None = None) -> list[int]:
        """Ids of a text. Releases the interpreter lock while it works. Raises `TooManyTokens` above the limit."""
        encoding = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        if limit is not None and len(encoding) > limit:
            raise TooManyTokens(len(encoding))
        return encoding.ids

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens)

    def token_id(self, text: str) -> int | None:
        """The token that the vocabulary writes so; None if there is none."""
        return self._tokenizer.token_to_id(text)

    def token_text(self, token: int) -> str:
        """One token as the vocabulary writes it; empty for an id that has none."""
        return self._tokenizer.id_to_token(token) or ""


def _json_object(files: dict[str, bytes], name: str) -> dict[str, Any]:
    if name not in files:
        return {}
    try:
        value = orjson.loads(files[name])
    except orjson.JSONDecodeError as error:
        raise TokenizerError(f"{name} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{name} is not a JSON object")
    return value


def _special_tokens(config: dict[str, Any], special_map: dict[str, Any]) -> dict[str, str]:
    """The named special tokens, from plain strings or `AddedToken` objects; tokenizer_config.json comes first."""
    found: dict[str, str] = {}
    for name in NAMED_TOKENS:
        for source in (config, special_map):
            value = source.get(name)
            if isinstance(value, dict):
                value = value.get("content")
            if isinstance(value, str):
                found[name] = value
                break
    return found
