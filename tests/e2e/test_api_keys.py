"""API keys over all processes: limits that no number of frontends stretches, tenants apart, and secrets kept."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from executor_svc.script import Script
from scheduler_svc.keys import ApiKey, add_key, fingerprint_of, new_secret, remove_key

ACME, OTHER, OPERATOR = (new_secret() for _ in range(3))
PROMPT = list(range(5, 105))


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.jsonl"
    add_key(path, ApiKey(id="acme-1", tenant="acme", sha256=fingerprint_of(ACME).hex(), max_concurrent=3))
    other = fingerprint_of(OTHER).hex()
    add_key(path, ApiKey(id="other-1", tenant="other", sha256=other, tokens_per_minute=400))
    return path


def ask(url: str, key: str, max_tokens: int = 4, **fields: Any) -> httpx.Response:
    body = {"prompt": PROMPT, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0} | fields
    # A connection of its own: it may come to any frontend.
    return httpx.post(f"{url}/v1/completions", json=body, headers={"authorization": f"Bearer {key}"}, timeout=60)


def test_keys_over_all_processes(
    start: Callable[..., Any], key_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GILIR_API_KEY", OPERATOR)
    stack = start("--frontends", "2", "--api-keys", str(key_file), "--log-level", "debug", "--log-format", "json")
    stack.client.headers["authorization"] = f"Bearer {OPERATOR}"
    stack.fake(script=Script(delay_s=0.02), num_blocks=512)
    stack.ready()
    stack.until(lambda: _all_answer(stack.url), "both frontends to know the model")

    _tenants_share_no_prefix(stack.url)
    _never_more_than_three(stack)
    _tokens_run_out(stack.url)
    assert ask(stack.url, "gk-wrong").status_code == 401
    remove_key(key_file, "acme-1")
    stack.until(lambda: ask(stack.url, ACME).status_code == 401, "the key to be refused")
    stack.until(lambda: {ask(stack.url, ACME).status_code for _ in range(8)} == {401}, "each frontend to refuse it")
    stack.until_idle()
    _no_secret_is_told(stack, [ACME, OTHER, OPERATOR])


def _all_answer(url: str) -> bool:
    return {ask(url, OPERATOR, 1).status_code for _ in range(10)} == {200}


def _tenants_share_no_prefix(url: str) -> None:
    cached = [
        ask(url, key, 1, prompt=[*PROMPT[:64], 7]).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        for key in (ACME, ACME, OTHER, OTHER)
    ]
    assert cached == [0, 64, 0, 64]


def _never_more_than_three(stack: Any) -> None:
    """Of ten at once three are served, whichever frontends they come to; the others are told which limit."""
    with ThreadPoolExecutor(10) as pool:
        gate = threading.Barrier(10)

        def one(_: int) -> httpx.Response:
            gate.wait()
            return ask(stack.url, ACME, 100)

        answers = list(pool.map(one, range(10)))
    refused = [answer for answer in answers if answer.status_code == 429]
    assert len(refused) == 7 and all(answer.status_code in (200, 429) for answer in answers)
    for answer in refused:
        assert answer.json()["error"]["code"] == "rate_limit_exceeded" and answer.headers["retry-after"] == "1"
        assert "3 requests at a time" in answer.json()["error"]["message"]
    stack.until_idle()
    assert ask(stack.url, ACME, 1, n=2).status_code == 200


def _tokens_run_out(url: str) -> None:
    """132 of 400 are used; a prompt of 100 and its 4 fit twice more."""
    statuses = []
    while 429 not in statuses and len(statuses) < 9:
        answer = ask(url, OTHER)
        statuses.append(answer.status_code)
    assert statuses[:2] == [200, 200] and statuses[-1] == 429 and len(statuses) <= 4
    assert "400 tokens a minute" in answer.json()["error"]["message"] and 1 <= int(answer.headers["retry-after"]) <= 15
    assert ask(url, OPERATOR).status_code == 200


def _no_secret_is_told(stack: Any, secrets: list[str]) -> None:
    log = stack.scheduler.log.read_text()
    assert '"api_key_id": "acme-1"' in log and "invalid_api_key" in log
    children = subprocess.run(["pgrep", "-P", str(stack.scheduler.pid)], capture_output=True, text=True).stdout.split()
    assert len(children) == 2
    processes = [Path(f"/proc/{pid}/cmdline").read_text() for pid in [*children, str(stack.scheduler.pid)]]
    plans = b"".join(path.read_bytes() for path in stack.services.plan_log.iterdir())
    for secret in secrets:
        for told in (secret, fingerprint_of(secret).hex()):
            assert told not in log and not any(told in line for line in processes)
            assert told.encode() not in plans
