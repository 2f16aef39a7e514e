from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from executor_svc.default_model.train.network import LanguageModel, NetworkShape
from executor_svc.default_model.train.vocabulary import BEGIN, END, END_OF_TEXT, render_chat

FOLDER = Path(__file__).parents[2] / "executor_svc" / "default_model"
# From chapters held out of the training: Acts 11, Northanger Abbey 16.
HELD_OUT = (
    "They therefore who were scattered abroad by the oppression that arose about Stephen traveled as far as Phoenicia, "
    "Cyprus, and Antioch, speaking the word to no one except to Jews only. But there were some of them, men of Cyprus "
    "and Cyrene, who, when they had come to Antioch, spoke to the Hellenists, preaching the Lord Jesus. The hand of "
    "the Lord was with them, and a great number believed and turned to the Lord. The report concerning them came to "
    "the ears of the assembly which was in Jerusalem.",
    "When the young ladies next met, they had a far more interesting subject to discuss. James Morland's second letter "
    "was then received, and the kind intentions of his father fully explained. A living, of which Mr. Morland was "
    "himself patron and incumbent, of about four hundred pounds yearly value, was to be resigned to his son as soon as "
    "he should be old enough to take it; no trifling deduction from the family income, no niggardly assignment to one "
    "of ten children.",
)
# The sixty commonest words of the training text make up half of it.
COMMON_WORDS = set(
    re.findall(
        r"\w+",
        "the and of to in a you i he that it for was his her be with is not as will but she him all have they had s "
        "your on my them from who at by me which yahweh their so this were said are no shall one there when out very "
        "god been or would what do",
    )
)
REQUESTS = (
    "Tell me a story.",
    "Who is David?",
    "Tell me about the whale.",
    "Write about Emma.",
    "Tell a story about the sea.",
    "What about the king?",
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small gain nothing from threads, and lose much on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


def mean_loss(model: PreTrainedModel, tokens: list[int]) -> float:
    rows = torch.tensor([tokens])
    with torch.inference_mode():
        return float(model(rows, labels=rows).loss)


def continuation(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, limit: int) -> list[int]:
    prompt = tokenizer(text, add_special_tokens=not text.startswith(BEGIN), return_tensors="pt")
    tokens = model.generate(**prompt, max_new_tokens=limit, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    return tokens[0, prompt["input_ids"].shape[1] :].tolist()


def chat_prompt(tokenizer: PreTrainedTokenizerBase, request: str) -> str:
    messages = [{"role": "user", "content": request}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def test_folder_is_complete_and_small() -> None:
    for name in (
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "chat_template.jinja",
        "README.md",
    ):
        assert (FOLDER / name).is_file(), name
    kept = [path for path in FOLDER.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in kept) <= 15_000_000


def test_weights_are_bfloat16_and_fit_the_config(model: PreTrainedModel) -> None:
    weights = load_file(FOLDER / "model.safetensors")
    config = json.loads((FOLDER / "config.json").read_text())
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert set(weights) == {name for name, _ in model.named_parameters()}
    assert config["architectures"] == ["LlamaForCausalLM"] and config["tie_word_embeddings"] is True
    assert all(weight.isfinite().all() for weight in weights.values())


def test_both_ends_stop_generation(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    ends = tokenizer.convert_tokens_to_ids([END, END_OF_TEXT])
    assert model.generation_config.eos_token_id == ends
    assert model.config.eos_token_id == ends
    assert (model.config.bos_token_id, tokenizer.eos_token) == (tokenizer.bos_token_id, END)


def test_training_network_is_the_architecture_of_transformers(model: PreTrainedModel) -> None:
    weights = {name: weight.float() for name, weight in load_file(FOLDER / "model.safetensors").items()}
    network = LanguageModel(NetworkShape())
    network.load_state_dict(weights)
    rows = torch.randint(0, 4096, (2, 65), generator=torch.Generator().manual_seed(5))
    with torch.compiler.set_stance("force_eager"), torch.inference_mode():
        torch.testing.assert_close(network(rows), model(rows).logits, rtol=1e-4, atol=1e-4)
        expected = torch.nn.functional.cross_entropy(model(rows[:, :-1]).logits.flatten(0, 1), rows[:, 1:].flatten())
        torch.testing.assert_close(network.loss(rows), expected, rtol=1e-4, atol=1e-4)


@settings(max_examples=300, deadline=None)
@given(text=st.text())
def test_any_text_comes_back_from_its_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    begin, *tokens = tokenizer(text)["input_ids"]
    assert begin == tokenizer.bos_token_id
    assert tokenizer.decode(tokens) == text


def test_plain_text_has_one_begin_and_no_end(tokenizer: PreTrainedTokenizerBase) -> None:
    tokens = tokenizer("Call me Ishmael.")["input_ids"]
    assert [token for token in tokens if token < 6] == [tokenizer.bos_token_id]


def test_chat_has_one_begin_and_the_form_of_the_training(tokenizer: PreTrainedTokenizerBase) -> None:
    turns = [("system", "You tell old stories."), ("user", "Hello"), ("assistant", "Good day."), ("user", "Go on.")]
    messages = [{"role": role, "content": f" {content}\n"} for role, content in turns]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == render_chat(turns)
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == text + "<|assistant|>"
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokens.count(tokenizer.bos_token_id) == 1
    assert tokens.count(tokenizer.eos_token_id) == len(turns)
    assert tokenizer.decode(tokens) == text


def test_chat_refuses_an_unknown_role(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(Exception, match="not tool"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)


@pytest.mark.parametrize("passage", HELD_OUT)
def test_held_out_text_is_likely(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, passage: str) -> None:
    loss = mean_loss(model, tokenizer(passage)["input_ids"])
    words = passage.split()
    random.Random(3).shuffle(words)
    # A uniform guess has 8.3 nats a token.
    assert loss < 4.5
    assert mean_loss(model, tokenizer(" ".join(words))["input_ids"]) > loss + 1.5


def test_last_positions_are_as_good_as_the_first(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    passage = tokenizer(HELD_OUT[1], add_special_tokens=False)["input_ids"]
    filler = tokenizer(" ".join(HELD_OUT) * 8)["input_ids"][: 1024 - len(passage)]
    rows = torch.tensor([filler + passage])
    with torch.inference_mode():
        logits = model(rows).logits[0, len(filler) - 1 : -1]
    late = float(torch.nn.functional.cross_entropy(logits, rows[0, len(filler) :]))
    assert late < mean_loss(model, [tokenizer.bos_token_id, *passage]) + 0.3


@pytest.mark.parametrize("prompt", ["The captain looked out over the sea and", '"My dear Emma," said'])
def test_greedy_text_is_made_of_words(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, prompt: str) -> None:
    text = tokenizer.decode(continuation(model, tokenizer, prompt, limit=80), skip_special_tokens=True)
    words = [word.lower() for word in re.findall(r"[A-Za-z]+", text)]
    known = {token.removeprefix("Ġ").lower() for token in tokenizer.get_vocab() if token.startswith("Ġ")}
    assert len(words) >= 20
    assert sum(word in known for word in words) >= 0.9 * len(words)
    assert sum(word in COMMON_WORDS for word in words) >= 0.3 * len(words)


def test_answers_end_by_themselves(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    torch.manual_seed(11)
    prompts = [chat_prompt(tokenizer, request) for request in REQUESTS]
    batch = tokenizer(prompts, add_special_tokens=False, padding=True, padding_side="left", return_tensors="pt")
    tokens = model.generate(
        **batch, max_new_tokens=250, do_sample=True, temperature=0.8, top_k=0, pad_token_id=tokenizer.pad_token_id
    )
    ended = [tokenizer.eos_token_id in row for row in tokens[:, batch["input_ids"].shape[1] :].tolist()]
    assert sum(ended) >= 4, ended


def test_greeting_is_answered(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    tokens = continuation(model, tokenizer, chat_prompt(tokenizer, "Hello"), limit=60)
    assert tokens[-1] == tokenizer.eos_token_id
    assert "Hello" in tokenizer.decode(tokens)
