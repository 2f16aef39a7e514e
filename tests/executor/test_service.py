"""The executor service as a process, and the parts of its start."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from common.wire import Drain, Leaving, Limits, Result
from executor_svc import service
from executor_svc.handover import Exchange
from executor_svc.kv_cache import FP8, block_bytes
from executor_svc.model import load_model
from executor_svc.runner import Runner
from executor_svc.service import StartError, make_limits, pick_device, start
from executor_svc.settings import ExecutorSettings
from tests.executor.mini_server import run
from tests.executor.plans import decode_plan, new_sequence, prefill_plan
from tests.executor.scripted_scheduler import ScriptedScheduler
from tests.executor.tiny_models import make_model, save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(make_model("llama"), tmp_path_factory.mktemp("models"))


def spawn(*flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "executor_svc", "--threads", "1", *flags]
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_a_whole_life(scheduler: ScriptedScheduler, folder: Path, tmp_path: Path) -> None:
    status = tmp_path / "attached"
    flags = ["--scheduler", scheduler.address, "--name", "one", "--model", str(folder), "--served-model-name", "tiny"]
    flags += ["--block-size", "8", "--num-blocks", "20", "--max-num-seqs", "4", "--status-file", str(status)]
    process = spawn(*flags)
    hello = scheduler.receive_hello(60)
    assert not status.exists()
    scheduler.attach(1)
    assert (hello.name, hello.model.name) == ("one", "tiny")
    assert hello.limits == Limits(8, 20, 0, 4, 2048)
    assert "tokenizer.json" in hello.model.tokenizer_files
    request = new_sequence(0, [50, 60, 70], [3], temperature=0.0)
    scheduler.send(prefill_plan(1, request))
    tokens = scheduler.receive(Result).tokens.tolist()
    assert status.exists()
    process.send_signal(signal.SIGTERM)
    assert scheduler.receive(Leaving).reason == "SIGTERM"
    scheduler.send(decode_plan(2, 0))
    tokens += scheduler.receive(Result).tokens.tolist()
    scheduler.send(Drain(1))
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0 and "Traceback" not in errors
    assert not status.exists()
    loaded = load_model(str(folder))
    here = Runner(loaded.decoder, loaded.card, hello.limits)
    expected = run(here, prefill_plan(1, request)).tokens.tolist() + run(here, decode_plan(2, 0)).tokens.tolist()
    assert tokens == expected


def test_a_model_that_cannot_be_loaded_is_one_line(tmp_path: Path) -> None:
    process = spawn("--model", str(tmp_path), "--log-level", "error")
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 1 and output == ""
    assert errors.startswith("error: ") and errors.count("\n") == 1 and "config.json" in errors


def settings(*flags: str) -> ExecutorSettings:
    return ExecutorSettings.from_command_line(list(flags))


def test_blocks_fill_the_memory_they_are_given(folder: Path) -> None:
    loaded = load_model(str(folder), dtype="float32")
    cpu = torch.device("cpu")
    each = block_bytes(loaded.decoder.config, 16, torch.float32)
    limits = make_limits(settings("--kv-cache-gib", "0.01"), loaded, cpu)
    assert limits.num_blocks * each <= 0.01 * 2**30 < (limits.num_blocks + 1) * each
    assert make_limits(settings(), loaded, cpu).num_blocks == 2**30 // each
    assert make_limits(settings("--num-blocks", "7"), loaded, cpu).num_blocks == 7


def test_no_memory_for_a_block(folder: Path) -> None:
    loaded = load_model(str(folder), dtype="float32")
    with pytest.raises(StartError, match="no memory for KV blocks"):
        make_limits(settings("--kv-cache-gib", "0.000001"), loaded, torch.device("cpu"))


def test_no_more_seats_than_tokens(folder: Path) -> None:
    limits = make_limits(
        settings("--max-num-seqs", "64", "--max-num-batched-tokens", "8"), load_model(str(folder)), torch.device("cpu")
    )
    assert (limits.max_num_seqs, limits.max_num_batched_tokens) == (8, 8)


def test_8_bit_kv_is_another_model(folder: Path) -> None:
    """Whoever keeps KV in fewer bits gives other answers, so it must not have the same fingerprint."""
    loaded = load_model(str(folder), dtype="float32", kv_cache_dtype="fp8")
    assert loaded.card.fingerprint != load_model(str(folder), dtype="float32").card.fingerprint
    shape = loaded.decoder.config
    assert 4 * block_bytes(shape, 16, FP8) == block_bytes(shape, 16, torch.float32)


def test_kv_that_the_device_does_not_have(tmp_path: Path) -> None:
    """Told before the model is loaded: here there is none."""
    flags = ("--device", "cpu", "--kv-cache-dtype", "fp8", "--model", str(tmp_path), "--scheduler", "tcp://127.0.0.1:1")
    with pytest.raises(StartError, match="kv-cache-dtype fp8: only a GPU has it"):
        start(settings(*flags))


def test_settings_of_graphs() -> None:
    assert settings().cuda_graphs and not settings("--no-cuda-graphs").cuda_graphs


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there() -> None:
    assert pick_device("auto") == torch.device("cpu")
    with pytest.raises(StartError, match="no GPU"):
        pick_device("cuda")


def test_a_gpu_is_taken_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch.cuda.is_available() or pick_device("auto:3") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    found = {wanted: str(pick_device(wanted)) for wanted in ("auto", "cuda", "auto:1", "cuda:1", "cpu")}
    assert found == {"auto": "cuda:0", "cuda": "cuda:0", "auto:1": "cuda:1", "cuda:1": "cuda:1", "cpu": "cpu"}
    for wanted in ("auto:2", "cuda:2"):
        with pytest.raises(StartError, match=f"^device {wanted}: GPUs are numbered from 0, and there are 2; exec"):
            pick_device(wanted)


def test_nothing_is_announced_before_the_warm_up_is_over(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C34: a request can only come once every kind of iteration has run, graphs included."""
    happened: list[str] = []
    for name in ("warm_up", "warm_up_graphs"):
        call = getattr(service, name)

        def noted(runner: Runner, _call: Any = call, _name: str = name) -> Any:
            result = _call(runner)
            happened.append(_name)
            return result

        monkeypatch.setattr(service, name, noted)
    exchanges: list[Exchange] = []
    monkeypatch.setattr(service, "Link", lambda *parts: (happened.append("link"), exchanges.append(parts[3])))
    service.start(settings("--model", str(folder), "--num-blocks", "20", "--device", "cpu"))
    exchanges[0].close()
    assert happened == ["warm_up", "warm_up_graphs", "link"]
