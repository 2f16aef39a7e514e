"""The tokenizer's files of a model folder, as bytes for the scheduler service, which alone tokenizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from executor_svc.model.errors import ModelError

TOKENIZER = "tokenizer.json"
_BESIDE = ("tokenizer_config.json", "special_tokens_map.json")
_SENTENCEPIECE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
_MAX_BYTES = 128 << 20


def read_tokenizer_files(folder: Path) -> dict[str, bytes]:
    """tokenizer.json, and tokenizer_config.json and special_tokens_map.json where they are.

    A folder with only a sentencepiece model has it converted, which needs `transformers`. Raises `ModelError`.
    """
    files = {}
    for name in (TOKENIZER, *_BESIDE):
        path = folder / name
        if path.is_file():
            files[name] = _read(path)
    if TOKENIZER not in files:
        files[TOKENIZER] = _convert(folder)
    if len(files[TOKENIZER]) > _MAX_BYTES:
        raise ModelError(f"{folder / TOKENIZER}: {len(files[TOKENIZER])} bytes; at most {_MAX_BYTES}")
    for name, data in files.items():
        _parse(folder / name, data)
    return files


def token_id(role: str, files: dict[str, bytes]) -> int | None:
    """The id of a special token, such as `eos_token`, by its text in tokenizer_config.json or special_tokens_map.json.

    None when the files do not name one, or the tokenizer does not know it.
    """
    text = None
    for name in _BESIDE:
        value = json.loads(files[name]).get(role) if name in files else None
        text = text or (value.get("content") if isinstance(value, dict) else value)
    if not isinstance(text, str):
        return None
    tokenizer = json.loads(files[TOKENIZER])
    for token in tokenizer.get("added_tokens") or ():
        if token.get("content") == text:
            return int(token["id"])
    vocabulary = (tokenizer.get("model") or {}).get("vocab") or {}
    if isinstance(vocabulary, dict):
        return vocabulary.get(text)
    return next((index for index, piece in enumerate(vocabulary) if piece[0] == text), None)


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
