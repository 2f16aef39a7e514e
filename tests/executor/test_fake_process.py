"""The scripted executor as a process of its own: its end, its model card, another script on the way."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np

from common.wire import Fault, Result, SamplingParams
from executor_svc.batch import BatchState
from executor_svc.fake_model import card_from_folder, readable_tokens
from executor_svc.pseudo_model import expected_tokens
from executor_svc.script import Action, Script
from tests.executor.plans import decode_plan, new_sequence, prefill_plan
from tests.executor.scripted_scheduler import ScriptedScheduler
from tests.executor.test_fake import PROMPT, make_runner, run


def test_a_process_dies_by_its_script(scheduler: ScriptedScheduler, tmp_path: Path) -> None:
    (tmp_path / "script.json").write_text('{"actions": {"2": "die_before"}}')
    flags = ["--scheduler", scheduler.address, "--name", "mortal", "--script", str(tmp_path / "script.json")]
    flags += ["--model", str(tmp_path), "--vocab-size", "300", "--served-model-name", "m", "--fingerprint", "ab" * 16]
    process = subprocess.Popen([sys.executable, "-m", "executor_svc.fake", *flags], stderr=subprocess.DEVNULL)
    hello = scheduler.welcome(1)
    assert (hello.name, hello.model.name, hello.model.vocab_size) == ("mortal", "m", 300)
    assert hello.model.fingerprint == bytes.fromhex("ab" * 16)
    scheduler.send(prefill_plan(1, new_sequence(0, PROMPT, [0])))
    result = scheduler.receive(Result)
    alphabet = np.arange(1, 300)
    assert result.tokens.tolist() == expected_tokens(PROMPT, 1, alphabet, SamplingParams(max_tokens=1))
    scheduler.send(decode_plan(2, 0))
    assert process.wait(60) == 9


def test_no_torch_behind_the_fake_executor() -> None:
    code = "import sys, executor_svc.fake; assert not {'torch', 'kernels', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def write_model(folder: Path) -> None:
    vocab = {"<s>": 0, "</s>": 1, "Ġhello": 2, "world": 3, "é": 4, "Ġ": 5, "ab": 6}
    (folder / "config.json").write_text('{"vocab_size": 8, "max_position_embeddings": 64, "eos_token_id": 1}')
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 7]}')
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}))
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')


def test_card_from_a_folder(tmp_path: Path) -> None:
    write_model(tmp_path)
    card = card_from_folder(tmp_path)
    assert (card.name, card.vocab_size, card.max_model_len, card.eos_ids) == (tmp_path.name, 8, 64, (1, 7))
    assert card.chat_template == "{{ messages }}" and set(card.tokenizer_files) == {
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert readable_tokens(card) == (2, 3, 6)
    assert card_from_folder(tmp_path, "other").fingerprint != card.fingerprint


def test_state_is_the_real_one() -> None:
    assert type(make_runner().state) is BatchState


def test_another_script_counts_its_plans_anew() -> None:
    runner = make_runner(Script(actions={1: Action.FAULT}))
    assert isinstance(runner.run(prefill_plan(1, new_sequence(0, PROMPT, [0, 1]))), Fault)
    runner.reset()
    run(runner, prefill_plan(1, new_sequence(0, PROMPT, [0, 1])))
    runner.follow(Script(actions={2: Action.FAULT}))
    run(runner, decode_plan(2, 0))
    assert isinstance(runner.run(decode_plan(3, 0)), Fault)


def test_another_script_ends_a_hang() -> None:
    runner = make_runner(Script(actions={1: Action.HANG}))
    results: list[Any] = []
    plan = prefill_plan(1, new_sequence(0, PROMPT, [0, 1]))
    thread = threading.Thread(target=lambda: results.append(runner.run(plan)))
    thread.start()
    runner.wait_plans(1, 10)
    thread.join(0.05)
    assert thread.is_alive()
    runner.follow(Script())
    thread.join(60)
    assert [type(result) for result in results] == [Result]
