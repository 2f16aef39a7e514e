"""The model card of a scripted executor: invented, or with the tokenizer of a real model's folder."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from common.wire import ModelCard

DEFAULT_MODEL = Path(__file__).parent / "default_model"
"""The model that comes with Gilir."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def invented_card(
    name: str = "fake",
    *,
    vocab_size: int = 512,
    max_model_len: int = 2048,
    eos_ids: tuple[int, ...] = (0,),
    fingerprint: bytes | None = None,
) -> ModelCard:
    """A card without a tokenizer: requests must bring token ids."""
    return ModelCard(
        name=name,
        fingerprint=fingerprint or hashlib.blake2b(name.encode(), digest_size=16).digest(),
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        eos_ids=eos_ids,
        dtype="float32",
    )


def card_from_folder(folder: Path, name: str | None = None, fingerprint: bytes | None = None) -> ModelCard:
    """A card with the tokenizer files, chat template, EOS ids and sizes of a Hugging Face folder; weights are not read.

    Raises OSError and ValueError for what is missing or unreadable.
    """
    config = json.loads((folder / "config.json").read_text())
    files = {file: (folder / file).read_bytes() for file in TOKENIZER_FILES if (folder / file).is_file()}
    name = name or folder.name
    return ModelCard(
        name=name,
        fingerprint=fingerprint or hashlib.blake2b(b"fake" + name.encode(), digest_size=16).digest(),
        vocab_size=int(config["vocab_size"]),
        max_model_len=int(config["max_position_embeddings"]),
        eos_ids=_eos_ids(folder, config),
        dtype="float32",
        chat_template=_chat_template(folder),
        tokenizer_files=files,
    )


def readable_tokens(card: ModelCard) -> tuple[int, ...]:
    """Tokens of letters only, so that a pseudo model's text looks like words; without a tokenizer, all but EOS."""
    tokenizer = card.tokenizer_files.get("tokenizer.json")
    if tokenizer is not None:
        vocab: Any = json.loads(tokenizer)["model"]["vocab"]
        pairs = vocab.items() if isinstance(vocab, dict) else ((item[0], i) for i, item in enumerate(vocab))
        word = re.compile("[Ġ▁]?[A-Za-z]{2,}")
        words = tuple(sorted(i for text, i in pairs if i < card.vocab_size and word.fullmatch(text)))
        if words:
            return words
    return tuple(i for i in range(card.vocab_size) if i not in card.eos_ids)


def _read_json(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text()) if path.is_file() else {}
    return content if isinstance(content, dict) else {}


def _eos_ids(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    found: set[int] = set()
    for source in (config, _read_json(folder / "generation_config.json")):
        ids = source.get("eos_token_id")
        found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return tuple(sorted(found))


def _chat_template(folder: Path) -> str:
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text()
    template = _read_json(folder / "tokenizer_config.json").get("chat_template")
    return template if isinstance(template, str) else ""
