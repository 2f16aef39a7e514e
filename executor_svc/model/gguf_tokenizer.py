"""The tokenizer in a GGUF file's metadata, as the files that stand beside a Hugging Face model."""

from __future__ import annotations

import json
from typing import Any

from executor_svc.model.errors import ModelError
from executor_svc.model.gguf import GGUFModel
from executor_svc.model.tokenizer_files import TOKENIZER, TokenizerFiles

_CONTROL, _USER_DEFINED = 3, 4
_TURN_ENDS = frozenset(("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>"))
_SPACE = "▁"
_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATTERNS: dict[str, tuple[str, ...]] = {
    "gpt-2": (_GPT2_PATTERN,),
    "smollm": (r"\p{N}", _GPT2_PATTERN),
    "llama-bpe": (_WORDS + r"\p{N}{1,3}" + _REST,),
    "qwen2": (_WORDS + r"\p{N}" + _REST,),
}
"""For each `tokenizer.ggml.pre`: the patterns that cut a text into words, one after the other."""


def gguf_tokenizer(model: GGUFModel) -> TokenizerFiles:
    """tokenizer.json and tokenizer_config.json. Raises `ModelError` for a tokenizer that cannot be rebuilt."""
    kind, tokens = model.field("tokenizer.ggml.model"), model.field("tokenizer.ggml.tokens")
    if not tokens:
        raise ModelError(f"{model.path}: no tokenizer: tokenizer.ggml.tokens is missing")
    if kind == "llama":
        content = _sentencepiece(model, tokens)
    elif kind == "gpt2":
        content = _byte_level(model, tokens)
    else:
        raise ModelError(f"{model.path}: tokenizer.ggml.model: {kind!r} is not supported (supported: llama, gpt2)")
    content["added_tokens"] = _added_tokens(model, tokens)
    content["post_processor"] = _ends(model, tokens)
    parsed = {TOKENIZER: content, "tokenizer_config.json": special_tokens(model)}
    contents = {name: json.dumps(value, ensure_ascii=False).encode() for name, value in parsed.items()}
    _check(model, contents[TOKENIZER], len(tokens))
    return TokenizerFiles(contents, parsed)


def special_tokens(model: GGUFModel) -> dict[str, Any]:
    """The texts of the special tokens, by the names of tokenizer_config.json."""
    tokens = model.field("tokenizer.ggml.tokens")
    found = {}
    for role, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = model.field(f"tokenizer.ggml.{name}_token_id")
        if index is not None and 0 <= index < len(tokens):
            found[f"{role}_token"] = tokens[index]
    return found


def end_ids(model: GGUFModel) -> tuple[int, ...]:
    """Every token that ends a text: those the metadata names, and control tokens known to end a turn of a chat."""
    tokens = model.field("tokenizer.ggml.tokens") or []
    types = model.field("tokenizer.ggml.token_type") or [1] * len(tokens)
    found = {model.field(f"tokenizer.ggml.{role}_token_id") for role in ("eos", "eot", "eom")}
    found.update(index for index, token in enumerate(tokens) if token in _TURN_ENDS and types[index] == _CONTROL)
    return tuple(sorted(index for index in found if index is not None and 0 <= index < len(tokens)))


def _byte_level(model: GGUFModel, tokens: list[str]) -> dict[str, Any]:
    name = model.field("tokenizer.ggml.pre", "gpt-2")
    if name not in _PATTERNS:
        raise ModelError(
            f"{model.path}: tokenizer.ggml.pre: {name!r} is not supported (supported: {', '.join(_PATTERNS)})"
        )
    merges = [merge.split(" ", 1) for merge in model.field("tokenizer.ggml.merges") or []]
    splits: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in _PATTERNS[name]
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "normalizer": {"type": "NFC"} if name == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
        "decoder": byte_level,
        # Llama 3 takes a word that is a token as it is, whatever its merges would make of it.
        "model": _bpe(tokens, merges, ignore_merges=name == "llama-bpe"),
    }


def _sentencepiece(model: GGUFModel, tokens: list[str]) -> dict[str, Any]:
    """BPE with bytes for unknown characters. The pieces stand in the order of their merges, which are not stored."""
    pieces = [_SPACE * len(token) if len(token) > 1 and not token.strip(" ") else token for token in tokens]
    known = {piece: index for index, piece in enumerate(pieces)}
    merges: list[list[str]] = []
    for piece in pieces:
        parts = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        pairs = [pair for pair in parts if pair[0] in known and pair[1] in known]
        merges.extend(list(pair) for pair in sorted(pairs, key=lambda pair: (known[pair[0]], known[pair[1]])))
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    back = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    decoders: list[dict[str, Any]] = [back, {"type": "ByteFallback"}, {"type": "Fuse"}]
    normalizers: list[dict[str, Any]] = [replace]
    if model.field("tokenizer.ggml.add_space_prefix", True):
        normalizers.insert(0, {"type": "Prepend", "prepend": _SPACE})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = special_tokens(model).get("unk_token")
    return {
        "version": "1.0",
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(pieces, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True),
    }


def _bpe(tokens: list[str], merges: list[list[str]], **options: Any) -> dict[str, Any]:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    return {"type": "BPE", "vocab": vocabulary, "merges": merges, **options}


def _added_tokens(model: GGUFModel, tokens: list[str]) -> list[dict[str, Any]]:
    """Tokens that are found in a text before anything else: control tokens, and those the model's makers added."""
    types = model.field("tokenizer.ggml.token_type") or [1] * len(tokens)
    return [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == _CONTROL,
        }
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind == _CONTROL or (kind == _USER_DEFINED and token.strip(" "))
    ]


def _ends(model: GGUFModel, tokens: list[str]) -> dict[str, Any] | None:
    """The post-processor that puts the begin and end tokens around a text, as the file says, or as llama.cpp does."""
    begins = model.field("tokenizer.ggml.model") == "llama" or model.field("tokenizer.ggml.pre") == "llama-bpe"
    template: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    special: dict[str, Any] = {}
    for role, default in (("bos", begins), ("eos", False)):
        index = model.field(f"tokenizer.ggml.{role}_token_id")
        if index is None or not model.field(f"tokenizer.ggml.add_{role}_token", default):
            continue
        token = tokens[index]
        special[token] = {"id": token, "ids": [index], "tokens": [token]}
        template.insert(0 if role == "bos" else len(template), {"SpecialToken": {"id": token, "type_id": 0}})
    if not special:
        return None
    return {"type": "TemplateProcessing", "single": template, "pair": template, "special_tokens": special}


def _check(model: GGUFModel, content: bytes, count: int) -> None:
    """Refuse what `tokenizers` cannot load: the scheduler service would not either."""
    from tokenizers import Tokenizer

    try:
        size = Tokenizer.from_str(content.decode()).get_vocab_size()
    except Exception as error:  # the package raises plain Exception
        raise ModelError(f"{model.path}: its tokenizer cannot be rebuilt: {error}") from error
    if size > count:
        raise ModelError(f"{model.path}: its tokenizer cannot be rebuilt: {size} tokens of {count}")
