"""Incremental detokenization: the pieces of text that come out, joined, are exactly what the whole would decode to.

For prompt P and output O the joined pieces equal `decode(P + O)` without the prefix that it shares with `decode(P)`,
where `decode` is that of the `tokenizers` library. One departure: a character that the end of the output cuts in half
becomes one U+FFFD, whatever the tokenizer. No text comes out before it is certain, so nothing is ever taken back.

Byte-level decoders and SentencePiece-like ones (`Replace`, `ByteFallback`, `Fuse`, `Strip`) are followed rule by rule,
at a constant cost a token. Other decoders are asked to decode a sliding window, as text-generation-inference does.
"""

from __future__ import annotations

import json
from codecs import utf_8_decode
from collections.abc import Iterable, Sequence
from typing import Protocol

import tokenizers

from common.token_text import byte_level_bytes, fallback_byte, fallback_rules

REPLACEMENT = "\ufffd"
MAX_HELD_BYTES = 64
"""A run of byte tokens is certain only when it ends (one bad byte spoils all of it), but no more than this is held."""


_View = tuple[bool, frozenset[str]]
"""Whether special tokens are skipped, and which of them nevertheless are not."""
_NONE: frozenset[str] = frozenset()


class Detokenizer(Protocol):
    """Turns the tokens of one sequence into text, a few at a time."""

    def push(self, ids: Iterable[int]) -> str:
        """The text that became certain with these tokens."""

    def finish(self) -> str:
        """The rest, when no token follows."""

    @property
    def tentative(self) -> str:
        """Whole characters that are held back because a later token could still change them."""


class ByteLevelPieces(dict[int, bytes]):
    """The bytes that each token stands for under a `ByteLevel` decoder, filled in as tokens are met."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, skipped: frozenset[int]) -> None:
        super().__init__()
        self._tokenizer, self._skipped = tokenizer, skipped

    def __missing__(self, token: int) -> bytes:
        text = None if token in self._skipped else self._tokenizer.id_to_token(token)
        piece = b"" if text is None else byte_level_bytes(text)
        self[token] = piece
        return piece


class ByteLevelDetokenizer:
    """UTF-8, decoded as bytes arrive; invalid ones become U+FFFD as in `String::from_utf8_lossy`."""

    __slots__ = ("_pieces", "_prompt_cut", "_rest")
    tentative = ""

    def __init__(self, pieces: ByteLevelPieces, prompt: Sequence[int]) -> None:
        self._pieces = pieces
        tail = b""
        for token in reversed(prompt):
            tail = pieces[token] + tail
            if len(tail) >= 4:
                break
        self._rest = tail[utf_8_decode(tail, "replace", False)[1] :]
        self._prompt_cut = bool(self._rest)
        """The prompt ends within a character, and `decode(P)` shows a U+FFFD in its place."""

    def push(self, ids: Iterable[int]) -> str:
        pieces = self._pieces
        data = self._rest + b"".join([pieces[token] for token in ids])
        text, used = utf_8_decode(data, "replace", False)
        self._rest = data[used:]
        return self._without_prompt(text) if self._prompt_cut else text

    def finish(self) -> str:
        text = REPLACEMENT if self._rest else ""
        self._rest = b""
        return self._without_prompt(text) if self._prompt_cut else text

    def _without_prompt(self, text: str) -> str:
        if text:
            self._prompt_cut = False
        return text.removeprefix(REPLACEMENT)


class FallbackPieces(dict[int, "str | int | None"]):
    """What each token gives to a SentencePiece-like decoder: text, a byte as an int, or None if it is passed over."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        skipped: frozenset[int],
        replaces: list[tuple[str, str]],
        with_bytes: bool,
    ) -> None:
        super().__init__()
        self._tokenizer, self._skipped, self._replaces, self._with_bytes = tokenizer, skipped, replaces, with_bytes

    def __missing__(self, token: int) -> str | int | None:
        piece: str | int | None = None if token in self._skipped else self._tokenizer.id_to_token(token)
        if isinstance(piece, str):
            for pattern, content in self._replaces:
                piece = piece.replace(pattern, content)
            value = fallback_byte(piece) if self._with_bytes else None
            piece = piece if value is None else value
        self[token] = piece
        return piece


class FallbackDetokenizer:
    """Text tokens pass through; byte tokens in a row are decoded together, and a bad run gives a U+FFFD a byte."""

    __slots__ = ("_bad", "_content", "_length", "_partial", "_pieces", "_seed", "_strip", "_text")

    def __init__(self, pieces: FallbackPieces, prompt: Sequence[int], strip: tuple[str, int]) -> None:
        self._pieces = pieces
        self._content, self._strip = strip[0], 0
        self._length, self._bad, self._text, self._partial = 0, False, "", b""
        """The open run: its bytes, whether one was bad, its whole characters and the bytes after them."""
        self._seed = ("", 0, False)
        """Of the run that was open when the prompt ended: whole characters, bytes, and whether one was cut."""
        run: list[int] = []
        for token in reversed(prompt):
            piece = pieces[token]
            if isinstance(piece, int):
                run.append(token)
            elif piece is not None:
                break
        if run:
            self.push(reversed(run))
            self._seed = (self._text, self._length, bool(self._partial))
        self._strip = self._left_to_strip(prompt, strip[1])

    def _left_to_strip(self, prompt: Sequence[int], strip: int) -> int:
        """Leading characters that the decoder strips, less those that it finds in the prompt."""
        if not strip:
            return 0
        head = ""
        for token in prompt:
            piece = self._pieces[token]
            head += chr(piece) if isinstance(piece, int) else piece or ""
            if len(head) >= strip:
                break
        return 0 if head.strip(self._content) else max(0, strip - len(head))

    @property
    def tentative(self) -> str:
        return self._stripped(_beyond(self._text, self._shown_of_prompt()))

    def push(self, ids: Iterable[int]) -> str:
        out: list[str] = []
        pieces = self._pieces
        for token in ids:
            piece = pieces[token]
            if isinstance(piece, str):
                if self._length:
                    out.append(self._close_run())
                out.append(piece)
            elif piece is not None:
                out.append(self._add_byte(piece))
        text = "".join(out)
        return self._strip_left(text) if self._strip else text

    def finish(self) -> str:
        if self._partial:
            seed, _, cut = self._seed
            text = _beyond(self._text + REPLACEMENT, seed + REPLACEMENT if cut else seed)
            self._end_run()
        else:
            text = self._close_run()
        return self._strip_left(text) if self._strip else text

    def _add_byte(self, value: int) -> str:
        """Lengthen the run. Returns what is certain already."""
        self._length += 1
        if self._bad:
            return REPLACEMENT
        self._partial += bytes((value,))
        try:
            text, used = utf_8_decode(self._partial, "strict", False)
        except UnicodeDecodeError:
            self._bad, self._text, self._partial = True, "", b""
            return self._decided(REPLACEMENT * self._length)
        self._text += text
        self._partial = self._partial[used:]
        if self._length <= MAX_HELD_BYTES:
            return ""
        released, self._text, self._length = self._text, "", len(self._partial)
        return self._decided(released)

    def _close_run(self) -> str:
        text = REPLACEMENT * self._length if self._partial else self._text
        text = "" if self._bad else self._decided(text)
        self._end_run()
        return text

    def _decided(self, text: str) -> str:
        """What a whole run decodes to, without what `decode(P)` shows of it."""
        shown = self._shown_of_prompt()
        self._seed = ("", 0, False)
        return _beyond(text, shown)

    def _shown_of_prompt(self) -> str:
        """What `decode(P)` shows of the run that was open when the prompt ended."""
        seed, length, cut = self._seed
        return REPLACEMENT * length if cut else seed

    def _end_run(self) -> None:
        self._length, self._bad, self._text, self._partial = 0, False, "", b""
        self._seed = ("", 0, False)

    def _stripped(self, text: str) -> str:
        place = 0
        while place < min(self._strip, len(text)) and text[place] == self._content:
            place += 1
        return text[place:]

    def _strip_left(self, text: str) -> str:
        rest = self._stripped(text)
        self._strip = 0 if rest else self._strip - len(text)
        return rest


def _beyond(text: str, shown: str) -> str:
    """A text without the beginning that it shares with another."""
    same = 0
    while same < min(len(shown), len(text)) and shown[same] == text[same]:
        same += 1
    return text[same:]


class WindowDetokenizer:
    """For other decoders: the difference between two decodings of a window, held while it ends in U+FFFD."""

    __slots__ = ("_ids", "_read", "_skipped", "_start", "_tokenizer")
    tentative = ""
    CONTEXT = 8
    """Tokens before the new ones that their decoding may depend on."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, prompt: Sequence[int], skipped: frozenset[int]) -> None:
        self._tokenizer, self._skipped = tokenizer, skipped
        self._ids = [token for token in prompt[-self.CONTEXT :] if token not in skipped]
        self._start, self._read = 0, len(self._ids)

    def push(self, ids: Iterable[int]) -> str:
        self._ids.extend(token for token in ids if token not in self._skipped)
        return self._advance(final=False)

    def finish(self) -> str:
        text = self._advance(final=True)
        return text.rstrip(REPLACEMENT) + REPLACEMENT if text.endswith(REPLACEMENT) else text

    def _advance(self, final: bool) -> str:
        before = self._tokenizer.decode(self._ids[self._start : self._read], False)
        after = self._tokenizer.decode(self._ids[self._start :], False)
        if len(after) <= len(before) or (after.endswith(REPLACEMENT) and not final):
            return ""
        self._start = max(self._start, len(self._ids) - self.CONTEXT)
        del self._ids[: self._start]
        self._start, self._read = 0, len(self._ids)
        return after[len(before) :]


class DetokenizerFactory:
    """Makes detokenizers of one tokenizer, and tells the bytes of single tokens."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = {t.content: i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special}
        decoder = {} if tokenizer.decoder is None else json.loads(tokenizer.decoder.__getstate__())
        self._is_byte_level = decoder.get("type") == "ByteLevel"
        self._rules = None if self._is_byte_level else fallback_rules(decoder)
        self._skipped: dict[_View, frozenset[int]] = {}
        self._byte_level: dict[_View, ByteLevelPieces] = {}
        self._fallback: dict[_View, FallbackPieces] = {}

    def create(self, prompt: Sequence[int], skip_special_tokens: bool, shown: frozenset[str] = _NONE) -> Detokenizer:
        """A detokenizer for what follows this prompt. `shown`: special tokens that are not skipped with the others."""
        view = (skip_special_tokens, shown)
        if self._is_byte_level:
            return ByteLevelDetokenizer(self._byte_pieces(view), prompt)
        if self._rules is not None:
            replaces, with_bytes, strip = self._rules
            return FallbackDetokenizer(self._fallback_pieces(view, replaces, with_bytes), prompt, strip)
        return WindowDetokenizer(self._tokenizer, prompt, self._skips(view))

    def token_bytes(self, token: int, skip_special_tokens: bool = False) -> bytes:
        """What one token adds to the text, as UTF-8 bytes; part of a character where the token is one."""
        view = (skip_special_tokens, _NONE)
        if self._is_byte_level:
            return self._byte_pieces(view)[token]
        if self._rules is not None:
            piece = self._fallback_pieces(view, *self._rules[:2])[token]
            return bytes((piece,)) if isinstance(piece, int) else (piece or "").encode()
        return self._tokenizer.decode([token], skip_special_tokens).encode()

    def _skips(self, view: _View) -> frozenset[int]:
        """Tokens that add no text."""
        if view not in self._skipped:
            skip, shown = view
            special = self._special.items() if skip else ()
            self._skipped[view] = frozenset(token for content, token in special if content not in shown)
        return self._skipped[view]

    def _byte_pieces(self, view: _View) -> ByteLevelPieces:
        if view not in self._byte_level:
            self._byte_level[view] = ByteLevelPieces(self._tokenizer, self._skips(view))
        return self._byte_level[view]

    def _fallback_pieces(self, view: _View, replaces: list[tuple[str, str]], with_bytes: bool) -> FallbackPieces:
        if view not in self._fallback:
            self._fallback[view] = FallbackPieces(self._tokenizer, self._skips(view), replaces, with_bytes)
        return self._fallback[view]
