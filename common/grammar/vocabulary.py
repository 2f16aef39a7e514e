"""The bytes that each token adds to a text, read off a model's tokenizer.json."""

from __future__ import annotations

import json

import tokenizers

from common.token_text import byte_level_bytes, fallback_byte, fallback_rules


def vocabulary_bytes(tokenizer_json: bytes, vocab_size: int) -> list[bytes]:
    """One entry for each row of the embedding; empty for special tokens, which are no text, and for unused rows.

    Raises whatever the `tokenizers` library raises on a file that is none.
    """
    tokenizer = tokenizers.Tokenizer.from_buffer(tokenizer_json)
    special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    decoder = {} if tokenizer.decoder is None else json.loads(tokenizer.decoder.__getstate__())
    byte_level = decoder.get("type") == "ByteLevel"
    replaces, with_bytes, _ = fallback_rules(decoder) or ([], False, ("", 0))
    entries = [b""] * vocab_size
    for text, token in tokenizer.get_vocab().items():
        if token in special or token >= vocab_size:
            continue
        value = fallback_byte(text) if with_bytes else None
        if value is not None:
            entries[token] = bytes((value,))
        elif byte_level:
            entries[token] = byte_level_bytes(text)
        else:
            for pattern, content in replaces:
                text = text.replace(pattern, content)
            entries[token] = text.encode()
    return entries
