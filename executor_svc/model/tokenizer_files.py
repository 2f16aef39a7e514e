"""The tokenizer's files of a model folder, as bytes for the scheduler service, which alone tokenizes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from executor_svc.model.errors import ModelError

TOKENIZER = "tokenizer.json"
_BESIDE = ("tokenizer_config.json", "special_tokens_map.json")
_SENTENCEPIECE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
_MAX_BYTES = 128 << 20


@dataclass(frozen=True)
class TokenizerFiles:
    """tokenizer.json, and tokenizer_config.json and special_tokens_map.json where they are."""

    contents: dict[str, bytes]
    parsed: dict[str, dict[str, Any]]

    def token_id(self, role: str) -> int | None:
        """The id of a special token, such as `eos_token`; None when the files name none, or one that is unknown.

        Its text stands in tokenizer_config.json or special_tokens_map.json, its id in tokenizer.json.
        """
        text = None
        for name in _BESIDE:
            value = self.parsed.get(name, {}).get(role)
            text = text or (value.get("content") if isinstance(value, dict) else value)
        if not isinstance(text, str):
            return None
        try:
            return _find(self.parsed[TOKENIZER], text)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise ModelError(f"{TOKENIZER}: malformed added_tokens or vocab: {error!r}") from error


def _find(tokenizer: dict[str, Any], text: str) -> int | None:
    for token in tokenizer.get("added_tokens") or ():
        if token["content"] == text:
            return int(token["id"])
    vocabulary = (tokenizer.get("model") or {}).get("vocab") or {}
    if isinstance(vocabulary, dict):
        return vocabulary.get(text)
    return next((index for index, piece in enumerate(vocabulary) if piece[0] == text), None)


def read_tokenizer_files(folder: Path) -> TokenizerFiles:
    """Read and parse them. A folder with only a sentencepiece model has it converted, which needs `transformers`.

    Raises `ModelError`.
    """
    contents = {name: _read(folder / name) for name in (TOKENIZER, *_BESIDE) if (folder / name).is_file()}
    if TOKENIZER not in contents:
        contents[TOKENIZER] = _convert(folder)
    if len(contents[TOKENIZER]) > _MAX_BYTES:
        raise ModelError(f"{folder / TOKENIZER}: {len(contents[TOKENIZER])} bytes; at most {_MAX_BYTES}")
    return TokenizerFiles(contents, {name: _parse(folder / name, data) for name, data in contents.items()})


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from error


def _parse(path: Path, data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError as error:
        raise ModelError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: expected a JSON object")
    return value


def _convert(folder: Path) -> bytes:
    found = next((name for name in _SENTENCEPIECE if (folder / name).is_file()), None)
    if found is None:
        raise ModelError(f"{folder}: no tokenizer: neither {TOKENIZER} nor a sentencepiece model")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ModelError(
            f"{folder / found}: only a sentencepiece tokenizer; to convert it: pip install transformers sentencepiece"
        ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        return str(tokenizer.backend_tokenizer.to_str()).encode()
    except Exception as error:  # whatever it raises, the user needs the one line
        raise ModelError(f"{folder / found}: cannot be converted to {TOKENIZER}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
