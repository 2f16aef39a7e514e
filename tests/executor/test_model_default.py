"""The embedded default model against `transformers`. It is part of the repository: without it these tests fail."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import executor_svc
from executor_svc.model import LoadedModel, load_model
from tests.executor.paged_driver import generate

torch.set_num_threads(1)

FOLDER = Path(executor_svc.__file__).parent / "default_model"
NEW_TOKENS = 40
TEXTS = (
    "",
    "The",
    "It was a dark and",
    "In the beginning God created the heavens and the earth.",
    "Emma Woodhouse, handsome, clever, and rich, with a comfortable home and happy disposition",
    "Call me Ishmael. " * 3,
    "She said nothing more. " * 12,
    "And it came to pass in those days, that the people went out to the city. " * 16,
)
CHATS = ("Tell me about the whale.", "Who is Mr. Darcy?")


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(str(FOLDER), dtype="float32")


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # texts go on: the length of all is the same
    return model


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def prompts(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        for text in CHATS
    ]
    return [tokenizer(text).input_ids for text in TEXTS] + chats


@pytest.fixture(scope="module")
def expected(reference: PreTrainedModel, prompts: list[list[int]]) -> list[list[int]]:
    texts = []
    for prompt in prompts:
        out = reference.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False)
        texts.append(out[0, len(prompt) :].tolist())
    return texts


@pytest.mark.parametrize(("chunk", "block_size"), [(1, 16), (7, 1), (16, 32), (1000, 16)])
def test_greedy_tokens_equal_transformers(
    chunk: int, block_size: int, loaded: LoadedModel, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    assert max(len(prompt) for prompt in prompts) > 250
    streams = generate(loaded.decoder, prompts, NEW_TOKENS, chunk=chunk, block_size=block_size)
    assert [stream.generated for stream in streams] == expected


def test_the_card(loaded: LoadedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    card = loaded.card
    assert card.name == "default_model"
    assert tokenizer.eos_token_id in card.eos_ids
    assert card.chat_template == tokenizer.chat_template != ""
    assert card.max_model_len == 1024
    assert card.vocab_size >= len(tokenizer)
    assert load_model(str(FOLDER)).card.dtype == "bfloat16"
