"""lm-eval's local-completions and local-chat-completions: the same results as from the weights themselves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

TASKS = Path(__file__).parent / "tasks"
STOPS, MAX_TOKENS = ("\n\n", ","), 12
"""As in write.yaml."""
pytestmark = [pytest.mark.clients, pytest.mark.timeout(1800)]


class Weights:
    """The model by itself, in float32."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.eos = set(self.model.generation_config.eos_token_id)

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    @torch.inference_mode()
    def score(self, start: str, end: str) -> tuple[float, bool]:
        """Log-probability of `end` after `start`, and whether it is the greedy continuation."""
        whole, first = self.ids(start + end), len(self.ids(start))
        logprobs = self.model(torch.tensor([whole])).logits[0].log_softmax(-1)[first - 1 : -1]
        target = torch.tensor(whole[first:])
        value = logprobs.gather(1, target[:, None]).sum().item()
        return value, bool((logprobs.argmax(-1) == target).all())

    @torch.inference_mode()
    def write(self, prompt: list[int]) -> str:
        """The greedy continuation up to an EOS, a stop string, or so many tokens."""
        ids = list(prompt)
        for _ in range(MAX_TOKENS):
            token = int(self.model(torch.tensor([ids])).logits[0, -1].argmax())
            if token in self.eos:
                break
            ids.append(token)
            text = self.tokenizer.decode(ids[len(prompt) :])
            if any(stop in text for stop in STOPS):
                break
        text = self.tokenizer.decode(ids[len(prompt) :])
        return text[: min((text.find(stop) for stop in STOPS if stop in text), default=len(text))]


@pytest.fixture(scope="module")
def weights(model: Path) -> Weights:
    return Weights(model)


def evaluate(installed: Any, folder: Path, tasks: str, *arguments: str) -> dict[str, list[Any]]:
    """Run lm-eval; returns each task's samples, by their place in the data."""
    shutil.copytree(TASKS, folder, dirs_exist_ok=True)
    given = ["--tasks", tasks, "--include_path", ".", "--log_samples", "--output_path", "out", *arguments]
    installed("lm-eval").run("lm-eval", "run", *given, folder=folder)
    samples: dict[str, list[Any]] = {}
    for path in folder.glob("out/**/samples_*.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        task = path.name.removeprefix("samples_").rsplit("_", 1)[0]
        samples[task] = sorted(rows, key=lambda row: row["doc_id"])
    assert set(samples) == set(tasks.split(","))
    return samples


@pytest.mark.parametrize("backend", ["remote", "huggingface"])
def test_completions_are_those_of_the_weights(
    url: str, installed: Any, weights: Weights, tmp_path: Path, backend: str
) -> None:
    model = f"model=default_model,base_url={url}/v1/completions,tokenizer_backend={backend},max_length=1024"
    model += f",num_concurrent=2{f',tokenizer={weights.folder}' if backend == 'huggingface' else ''}"
    flags = ["--model", "local-completions", "--model_args", model, "--batch_size", "3"]
    samples = evaluate(installed, tmp_path, "gilir_choice,gilir_write", *flags)
    for sample in samples["gilir_choice"]:
        doc = sample["doc"]
        for end, (answer,) in zip(doc["ends"], sample["resps"], strict=True):
            value, greedy = weights.score(doc["start"], end)
            assert float(answer[0]) == pytest.approx(value, abs=2e-3)
            assert str(answer[1]) == str(greedy)
    for sample in samples["gilir_write"]:
        assert sample["resps"] == [[weights.write(weights.ids(sample["doc"]["start"]))]]


def test_chats_are_those_of_the_weights(url: str, installed: Any, weights: Weights, tmp_path: Path) -> None:
    model = f"model=default_model,base_url={url}/v1/chat/completions,num_concurrent=2,max_length=1024"
    flags = ["--model", "local-chat-completions", "--model_args", model, "--apply_chat_template"]
    samples = evaluate(installed, tmp_path, "gilir_write", *flags)
    tokenizer = AutoTokenizer.from_pretrained(weights.folder)
    for sample in samples["gilir_write"]:
        messages = [{"role": "user", "content": sample["doc"]["start"]}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert sample["resps"] == [[weights.write(weights.ids(text))]]
