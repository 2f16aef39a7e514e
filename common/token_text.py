"""What single tokens of a vocabulary stand for, under the two usual kinds of decoder."""

from __future__ import annotations

from typing import Any


def fallback_rules(decoder: dict[str, Any]) -> tuple[list[tuple[str, str]], bool, tuple[str, int]] | None:
    """A decoder's replacements, whether it decodes byte tokens, and its left strip; None if it is of another kind."""
    steps = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    kinds = [step.get("type") for step in steps]
    replaces: list[tuple[str, str]] = []
    while kinds and kinds[0] == "Replace":
        pattern = steps[len(replaces)]["pattern"].get("String")
        if pattern is None:
            return None
        replaces.append((pattern, steps[len(replaces)]["content"]))
        kinds.pop(0)
    if kinds not in (["ByteFallback", "Fuse"], ["ByteFallback", "Fuse", "Strip"], ["Fuse"], ["Fuse", "Strip"]):
        return None
    strip = (" ", 0)
    if kinds[-1] == "Strip":
        if steps[-1]["stop"]:
            return None
        strip = (steps[-1]["content"], steps[-1]["start"])
    return replaces, kinds[0] == "ByteFallback", strip


def fallback_byte(token: str) -> int | None:
    """The byte that a token `<0xAB>` names."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return int(token[3:5], 16)
        except ValueError:
            return None
    return None


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's stand-ins: visible Latin-1 characters stand for themselves, the other bytes follow from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [value for value in range(256) if value not in visible]
    return {chr(v): v for v in visible} | {chr(0x100 + i): v for i, v in enumerate(hidden)}


_BYTE_OF = _byte_alphabet()


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a byte-level token; one with a character outside the alphabet stands for itself."""
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()
