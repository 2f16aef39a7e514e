"""A sequence's tokens are its own: alone, batched, over prefix hits, chunks and preemption (C07, C15, C26)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.prompts import TEXTS

pytestmark = pytest.mark.timeout(400)  # a CPU without a strict mode of its math library is slow
LENGTH = 48
VARIANTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 7},
    "penalised": {"frequency_penalty": 1.0, "repetition_penalty": 1.2},
    "filtered": {"temperature": 0.8, "seed": 2**64 - 1, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    "biased": {"logit_bias": {"9": 3.5}, "min_tokens": 30, "ignore_eos": False},
    "logprobs": {"logprobs": 2},
}


def answers(stack: Any, fields: dict[str, Any], max_tokens: int, at_once: int) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(at_once) as pool:
        found = list(pool.map(lambda text: stack.complete(text, max_tokens, **fields).json(), TEXTS))
    stack.until_idle()
    return [dict(answer["choices"][0], usage=answer["usage"]) for answer in found]


def essence(choice: dict[str, Any]) -> Any:
    """What must be equal: text and why it ended, and logprobs within rounding."""
    logprobs = choice["logprobs"]
    scores = logprobs and [round(value, 3) for value in logprobs["token_logprobs"]]
    return choice["text"], choice["finish_reason"], scores


@pytest.fixture(scope="module")
def alone(real_stack: Any) -> dict[str, list[dict[str, Any]]]:
    """Each request by itself on a large pool."""
    return {name: answers(real_stack, fields, LENGTH, at_once=1) for name, fields in VARIANTS.items()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_in_a_batch_and_over_prefix_hits(real_stack: Any, alone: dict[str, Any], variant: str) -> None:
    together = answers(real_stack, VARIANTS[variant], LENGTH, at_once=6)
    assert [essence(c) for c in together] == [essence(c) for c in alone[variant]]


def test_under_preemption_and_in_small_chunks(start: Callable[..., Any], alone: dict[str, Any]) -> None:
    stack = start("--max-num-batched-tokens", "9", "--max-num-seqs", "6", "--admission", "immediate")
    # Room for about three of the six at their full length.
    stack.real("small", "--block-size", "8", "--num-blocks", "30", "--max-num-seqs", "6")
    stack.ready()
    for variant, fields in VARIANTS.items():
        found = answers(stack, fields, LENGTH, at_once=6)
        assert [essence(c) for c in found] == [essence(c) for c in alone[variant]], variant
        for choice, original in zip(found, alone[variant], strict=True):
            usage = choice["usage"]
            assert usage["prompt_tokens"] == original["usage"]["prompt_tokens"]
            assert usage["completion_tokens"] == original["usage"]["completion_tokens"] <= LENGTH
            assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]
            if choice["logprobs"]:
                assert len(choice["logprobs"]["tokens"]) == usage["completion_tokens"]
    assert stack.metric("vllm:num_preemptions_total") >= len(VARIANTS)


def test_streamed_text_is_the_same_text(real_stack: Any, alone: dict[str, Any]) -> None:
    for text, choice in zip(TEXTS, alone["greedy"], strict=True):
        pieces = [c["text"] for event in real_stack.stream(text, LENGTH) for c in event["choices"]]
        assert "".join(pieces) == choice["text"]


def test_unseeded_requests_differ(real_stack: Any) -> None:
    texts = {real_stack.text(TEXTS[0], 30, temperature=1.0) for _ in range(3)}
    assert len(texts) > 1


@pytest.mark.nightly
def test_greedy_tokens_equal_transformers(real_stack: Any, model_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    for text in TEXTS:
        ids = tokenizer(text, return_tensors="pt").input_ids
        wanted = model.generate(ids, max_new_tokens=64, do_sample=False)[0, ids.shape[1] :].tolist()
        answer = real_stack.complete(ids[0].tolist(), 64, logprobs=0).json()["choices"][0]
        pieces = [tokenizer.decode([token]) for token in wanted]
        whole = [piece for piece in pieces if "\ufffd" not in piece]
        assert answer["text"] == tokenizer.decode(wanted, skip_special_tokens=True)
        assert [t for t in answer["logprobs"]["tokens"] if t in whole] == whole
