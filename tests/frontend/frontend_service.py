"""Starts a frontend process in front of a scripted core."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
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
    client: httpx.Client

    def ids(self, text: str, model: str = BYTE_LEVEL) -> list[int]:
        return self.tokenizers[model].encode(text, add_special_tokens=False).ids

    def eos(self, model: str = BYTE_LEVEL) -> int:
        return next(card.eos_ids[0] for card in self.core.models if card.name == model)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def get(self, path: str) -> httpx.Response:
        return self.client.get(path)

    def raw(self, path: str, body: bytes, **headers: str) -> httpx.Response:
        return self.client.post(path, content=body, headers=headers)

    def complete(self, **body: Any) -> httpx.Response:
        return self.post("/v1/completions", **{"model": BYTE_LEVEL, "prompt": "Hello", **body})

    def chat(self, **body: Any) -> httpx.Response:
        messages = [{"role": "user", "content": "Hello"}]
        return self.post("/v1/chat/completions", **{"model": BYTE_LEVEL, "messages": messages, **body})


@contextmanager
def run_service(
    folder: Path,
    *flags: str,
    models: list[Any] | None = None,
    kv_capacity: int = 100_000,
    key: str = "",
    environment: dict[str, str] | None = None,
    log: Path | None = None,
) -> Iterator[Service]:
    """Start both. The process is killed if the test did not end it. `key`: the API key that the client sends. `log`: a
    file that takes the log of the frontend.
    """
    made = {BYTE_LEVEL: byte_level(), BYTE_FALLBACK: byte_fallback()}
    if models is None:
        models = [card(BYTE_LEVEL, made[BYTE_LEVEL], CHATML), card(BYTE_FALLBACK, made[BYTE_FALLBACK], LLAMA_CHAT)]
    address = f"ipc://{folder}/{uuid.uuid4().hex[:8]}"
    core = FakeCore(address, models, kv_capacity)
    with nullcontext() if log is None else log.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "scheduler_svc.frontend", "--core", address, "--port", "0", *flags],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, **(environment or {})},
        )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().removeprefix("listening: ").strip()
        tokenizers = {name: tokenizer for name, (tokenizer, _) in made.items()}
        headers = {"authorization": f"Bearer {key}"} if key else {}
        with httpx.Client(base_url=url, timeout=60, headers=headers) as client:
            service = Service(core, url, process, tokenizers, client)
            wait_until(lambda: len(service.get("/v1/models").json()["data"]) == len(models))
            yield service
    finally:
        process.kill()
        process.wait()
        core.close()


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Poll something that has no other way to tell."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not come about in time"
        time.sleep(0.01)


def events(response: httpx.Response) -> list[Any]:
    """The parsed chunks of a stream; `[DONE]` must be there once, last, and is left out."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines.count("data: [DONE]") == 1 and lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error object of an answer in OpenAI's shape."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return dict(error)
