"""What is pushed out piece by piece equals what the `tokenizers` library decodes as a whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers_for_tests import byte_fallback, byte_level

from scheduler_svc.frontend.detokenizer import (
    MAX_HELD_BYTES,
    ByteLevelDetokenizer,
    DetokenizerFactory,
    FallbackDetokenizer,
    WindowDetokenizer,
)

HARD_TEXT = "A 世界 👩‍👩‍👧 é\n  x"
DEFAULT_TOKENIZER = Path(__file__).parents[2] / "executor_svc" / "default_model" / "tokenizer.json"


def word_level() -> Tokenizer:
    """A tokenizer whose decoder is followed by none of our rules."""
    vocabulary = {token: i for i, token in enumerate(["[UNK]", "play", "##ing", "##ed", "walk", "the", "."])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return tokenizer


TOKENIZERS = {"byte level": byte_level()[0], "byte fallback": byte_fallback()[0]}
if DEFAULT_TOKENIZER.exists():
    TOKENIZERS["default model"] = Tokenizer.from_file(str(DEFAULT_TOKENIZER))
FACTORIES = {name: DetokenizerFactory(tokenizer) for name, tokenizer in TOKENIZERS.items()}


def pieces(name: str, prompt: list[int], output: list[int], skip_special: bool = True, size: int = 1) -> list[str]:
    detokenizer = FACTORIES[name].create(prompt, skip_special)
    chunks = [output[i : i + size] for i in range(0, len(output), size)]
    return [*(detokenizer.push(chunk) for chunk in chunks), detokenizer.finish()]


def expected(name: str, prompt: list[int], output: list[int], skip_special: bool = True) -> str:
    """decode(prompt + output) without what it shares with decode(prompt)."""
    tokenizer = TOKENIZERS[name]
    before = tokenizer.decode(prompt, skip_special)
    whole = tokenizer.decode(prompt + output, skip_special)
    shared = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(before, whole, strict=False))))
    return whole[shared:]


def ends_whole(name: str, ids: list[int], skip_special: bool) -> bool:
    """Whether no character is cut at the end, where a single U+FFFD is our own rule."""
    bytes_of = FACTORIES[name].token_bytes
    tail = b"".join(bytes_of(token, skip_special) for token in ids)[-3:]
    return all(not _is_cut(tail[i:]) for i in range(len(tail)))


def _is_cut(tail: bytes) -> bool:
    need = 4 if tail[0] >= 0xF0 else 3 if tail[0] >= 0xE0 else 2 if tail[0] >= 0xC0 else 1
    return len(tail) < need


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_random_ids(name: str, data: st.DataObject) -> None:
    size = TOKENIZERS[name].get_vocab_size()
    token = st.integers(0, size + 3)
    prompt = data.draw(st.lists(token, max_size=6))
    output = data.draw(st.lists(token, max_size=20))
    skip_special = data.draw(st.booleans())
    chunk = data.draw(st.integers(1, 5))
    if ends_whole(name, prompt + output, skip_special):
        joined = "".join(pieces(name, prompt, output, skip_special, chunk))
        assert joined == expected(name, prompt, output, skip_special)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_random_byte_runs(data: st.DataObject) -> None:
    """Runs of byte tokens with good and bad UTF-8 in them, cut anywhere between prompt and output."""
    good = st.text(alphabet="aé世👩\ufffd", min_size=1, max_size=3).map(str.encode)
    bad = st.binary(min_size=1, max_size=2)
    data_bytes = b"".join(data.draw(st.lists(good | bad, max_size=5)))
    word = TOKENIZERS["byte fallback"].token_to_id("▁the")
    ids = [3 + value for value in data_bytes]
    assert [TOKENIZERS["byte fallback"].id_to_token(i) for i in ids[:1]] == [f"<0x{v:02X}>" for v in data_bytes[:1]]
    for place in sorted(data.draw(st.sets(st.integers(0, len(ids)), max_size=2)), reverse=True):
        ids.insert(place, word)
    cut = data.draw(st.integers(0, len(ids)))
    if ends_whole("byte fallback", ids, True) and not data_bytes.count(b"\xef\xbf"):
        got = "".join(pieces("byte fallback", ids[:cut], ids[cut:]))
        assert got == expected("byte fallback", ids[:cut], ids[cut:])


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=st.text(max_size=40), cut=st.integers(0, 40))
@settings(max_examples=100, deadline=None)
def test_any_text_is_told_back(name: str, text: str, cut: int) -> None:
    ids = TOKENIZERS[name].encode(text, add_special_tokens=False).ids
    got = "".join(pieces(name, ids[:cut], ids[cut:], skip_special=False))
    assert got == expected(name, ids[:cut], ids[cut:], skip_special=False)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_hard_text_one_token_at_a_time(name: str) -> None:
    ids = TOKENIZERS[name].encode(HARD_TEXT, add_special_tokens=False).ids
    parts = pieces(name, [], ids)
    assert "".join(parts) == HARD_TEXT
    assert not any("\ufffd" in part for part in parts)
    assert len([part for part in parts if part]) > 5, "text must not wait for the end"


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_leading_space_of_the_output_stays(name: str) -> None:
    ids = TOKENIZERS[name].encode("Hello the", add_special_tokens=False).ids
    cut = next(i for i in range(1, len(ids)) if TOKENIZERS[name].decode(ids[:i]) == "Hello")
    assert "".join(pieces(name, ids[:cut], ids[cut:])) == " the"


def test_the_strip_applies_where_the_prompt_shows_nothing() -> None:
    """After a prompt of `<s>` alone the decoder strips the output's first space, once."""
    tokenizer = TOKENIZERS["byte fallback"]
    start, word = tokenizer.token_to_id("<s>"), tokenizer.token_to_id("▁the")
    assert "".join(pieces("byte fallback", [start], [word, word])) == "the the"
    assert "".join(pieces("byte fallback", [start, word], [word])) == " the"


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_real_replacement_character_is_shown(name: str) -> None:
    ids = TOKENIZERS[name].encode("a\ufffdb", add_special_tokens=False).ids
    assert "".join(pieces(name, [], ids)) == "a\ufffdb"


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("kept", [1, 2, 3])
def test_a_cut_emoji_becomes_one_replacement_character(name: str, kept: int) -> None:
    bytes_of = FACTORIES[name].token_bytes
    by_byte = {bytes_of(i): i for i in range(TOKENIZERS[name].get_vocab_size()) if len(bytes_of(i)) == 1}
    ids = [by_byte[bytes((value,))] for value in ("👩".encode() + "🙂".encode()[:kept])]
    parts = pieces(name, [], ids)
    assert "".join(parts) == "👩\ufffd"
    assert parts[-1].endswith("\ufffd"), "nothing may be shown of it before the end"


@pytest.mark.parametrize("name", TOKENIZERS)
def test_an_emoji_begun_by_the_prompt(name: str) -> None:
    bytes_of = FACTORIES[name].token_bytes
    by_byte = {bytes_of(i): i for i in range(TOKENIZERS[name].get_vocab_size()) if len(bytes_of(i)) == 1}
    ids = [by_byte[bytes((value,))] for value in "🙂".encode()]
    assert "".join(pieces(name, ids[:2], ids[2:])) == "🙂"
    assert "".join(pieces(name, ids[:2], ids[2:3])) == ""
    letter = by_byte[b"Q"]
    assert "".join(pieces(name, [letter, *ids[:2]], [])) == ""
    assert "".join(pieces(name, [letter, *ids[:2]], ids[2:3])) == ""
    assert "".join(pieces(name, [letter], ids[:2])) == "\ufffd"


def test_special_tokens_are_skipped_or_shown() -> None:
    tokenizer = TOKENIZERS["byte level"]
    ids = [*tokenizer.encode("Hello").ids, tokenizer.token_to_id("<|im_end|>"), *tokenizer.encode("world").ids]
    assert "".join(pieces("byte level", [], ids, skip_special=True)) == "Helloworld"
    assert "".join(pieces("byte level", [], ids, skip_special=False)) == "Hello<|im_end|>world"


def test_a_long_run_of_byte_tokens_is_not_held_for_ever() -> None:
    detokenizer = FACTORIES["byte fallback"].create([], True)
    text = "é" * (MAX_HELD_BYTES + 10)
    shown, longest_wait = "", 0
    for count, value in enumerate(text.encode(), 1):
        shown += detokenizer.push([3 + value])
        longest_wait = max(longest_wait, count - len(shown.encode()))
    assert shown + detokenizer.finish() == text
    assert longest_wait <= MAX_HELD_BYTES + 1


def test_held_characters_are_told_as_tentative() -> None:
    detokenizer = FACTORIES["byte fallback"].create([], True)
    assert [detokenizer.push([3 + value]) for value in "世".encode()] == ["", "", ""]
    assert detokenizer.tentative == "世"
    assert detokenizer.push([TOKENIZERS["byte fallback"].token_to_id("▁the")]) == "世 the"
    assert detokenizer.tentative == ""
    byte_tokens = [3 + value for value in "Q世".encode()]
    detokenizer = FACTORIES["byte fallback"].create(byte_tokens[:1], True)
    detokenizer.push(byte_tokens[1:])
    assert detokenizer.tentative == "世", "what belongs to the prompt must not count"


def test_another_decoder_is_decoded_by_window() -> None:
    tokenizer = word_level()
    factory = DetokenizerFactory(tokenizer)
    ids = tokenizer.encode("the playing walked . the walk").ids
    for cut in range(len(ids)):
        detokenizer = factory.create(ids[:cut], True)
        assert isinstance(detokenizer, WindowDetokenizer)
        got = "".join(detokenizer.push([token]) for token in ids[cut:]) + detokenizer.finish()
        assert tokenizer.decode(ids[:cut]) + got == tokenizer.decode(ids)


def test_which_decoder_is_followed_how() -> None:
    assert isinstance(FACTORIES["byte level"].create([], True), ByteLevelDetokenizer)
    assert isinstance(FACTORIES["byte fallback"].create([], True), FallbackDetokenizer)
    tokenizer = byte_fallback()[0]
    document = json.loads(tokenizer.to_str())
    document["decoder"]["decoders"][-1]["stop"] = 1
    strange = Tokenizer.from_str(json.dumps(document))
    assert isinstance(DetokenizerFactory(strange).create([], True), WindowDetokenizer)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_token_bytes_join_to_the_text(name: str) -> None:
    ids = TOKENIZERS[name].encode("x" + HARD_TEXT, add_special_tokens=False).ids
    joined = b"".join(FACTORIES[name].token_bytes(token) for token in ids).decode()
    assert joined.removeprefix(" ") == "x" + HARD_TEXT


@pytest.mark.parametrize("make", [lambda: byte_level()[0], lambda: byte_fallback()[0], word_level])
def test_special_tokens_that_are_shown_though_others_are_not(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    tokenizer.add_special_tokens(["[MARK]", "[OTHER]"])
    factory = DetokenizerFactory(tokenizer)
    word = tokenizer.encode("the", add_special_tokens=False).ids
    mark, other = tokenizer.token_to_id("[MARK]"), tokenizer.token_to_id("[OTHER]")

    def text(*shown: str, skip: bool = True) -> str:
        detokenizer = factory.create(word, skip, frozenset(shown))
        return "".join([detokenizer.push([token]) for token in [mark, *word, other, *word]]) + detokenizer.finish()

    assert [("[MARK]" in t, "[OTHER]" in t) for t in (text(), text("[MARK]"), text("[MARK]", skip=False))] == [
        (False, False),
        (True, False),
        (True, True),
    ]
    assert text("[MARK]").replace("[MARK]", "").split() == text().split()
