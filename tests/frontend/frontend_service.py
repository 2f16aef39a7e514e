"""Starts a frontend process in front of a scripted core."""

from __future__ import annotations

import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from fake_core import FakeCore
from tokenizers import Tokenizer
from tokenizers_for_tests import CHATML, LLAMA_CHAT, byte_fallback, byte_level, card

BYTE_LEVEL, BYTE_FALLBACK = "byte-level", "org/byte-fallback"


@dataclass
class Service:
    """A frontend process and the core that it talks to."""

    core: FakeCore
    url: str
    process: subprocess.Popen[str]
    tokenizers: dict[str, Tokenizer]

    def ids(self, text: str, model: str = BYTE_LEVEL) -> list[int]:
        return self.tokenizers[model].encode(text, add_special_tokens=False).ids

    def eos(self, model: str = BYTE_LEVEL) -> int:
        return next(card.eos_ids[0] for card in self.core.models if card.name == model)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=20)

    def complete(self, **body: Any) -> httpx.Response:
        return self.post("/v1/completions", **{"model": BYTE_LEVEL, "prompt": "Hello", **body})

    def chat(self, **body: Any) -> httpx.Response:
        messages = [{"role": "user", "content": "Hello"}]
        return self.post("/v1/chat/completions", **{"model": BYTE_LEVEL, "messages": messages, **body})


@contextmanager
def run_service(folder: Path, *flags: str, models: list[Any] | None = None) -> Iterator[Service]:
    """Start both. The process is killed if the test did not end it."""
    made = {BYTE_LEVEL: byte_level(), BYTE_FALLBACK: byte_fallback()}
    if models is None:
        models = [card(BYTE_LEVEL, made[BYTE_LEVEL], CHATML), card(BYTE_FALLBACK, made[BYTE_FALLBACK], LLAMA_CHAT)]
    address = f"ipc://{folder}/{uuid.uuid4().hex[:8]}"
    core = FakeCore(address, models)
    process = subprocess.Popen(
        [sys.executable, "-m", "scheduler_svc.frontend", "--core", address, "--port", "0", *flags],
        stdout=subprocess.PIPE,
        stderr=None,
        text=True,
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().removeprefix("listening: ").strip()
        service = Service(core, url, process, {name: tokenizer for name, (tokenizer, _) in made.items()})
        if models:
            wait_until(lambda: len(httpx.get(url + "/v1/models").json()["data"]) == len(models))
        yield service
    finally:
        process.kill()
        process.wait()
        core.close()


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Poll something that has no other way to tell."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not come about in time"
        time.sleep(0.01)
