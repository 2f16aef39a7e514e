"""`python -m tests.chaos.http`: fuzzed HTTP requests; none is answered by 500, none is stuck, no process ends.

Requests are made from the table of fields that `docs/api.md` tells: mostly right, with some values out of their range
or of another type, and now and then with other bytes. Hypothesis makes them, and shrinks the one that fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.chaos import described
from tests.chaos.client import exchange
from tests.chaos.fuzzing import simplest_failure
from tests.chaos.services import Services, Settings, served

PATIENCE_S = 120.0
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
FINE = {200, 400, 404, 405, 413}
"""Statuses that a fuzzed request may get while an executor serves."""
FOREIGN = ("Origin", "null")
"""What a page from elsewhere sends; such a request may also be 403."""

INTEGERS = st.sampled_from(
    [-1, 0, 1, 2, 5, 16, 20, 21, 128, 129, 4095, 4096, 2**31, 2**32, 2**63, 2**64, -(2**63), 10**30]
)
NUMBERS = st.sampled_from([-2.1, -2, -0.0, 0, 1e-9, 0.5, 1, 1.5, 2, 2.1, 10, 1e300, 5e-324]) | st.floats(width=32)
WORDS = st.sampled_from(
    ["", "a", "model", "stop", "é世\n\0👩‍👩‍👧", "\ud800", "<|end|>", "x" * 5000, "\U0010ffff"]
) | st.text(max_size=8)
JUNK = st.recursive(
    st.none() | st.booleans() | INTEGERS | NUMBERS | WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)
IDS = st.lists(st.integers(0, 4095), min_size=1, max_size=40)
TEXT = st.sampled_from(["In the beginning", " ", "\n", "👩‍👩‍👧 é", "<|begin|>", "a" * 3000]) | st.text(max_size=20)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool", "developer", "nobody"]) | JUNK},
    optional={
        "content": TEXT | JUNK | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXT}), max_size=2),
        "name": JUNK,
        "tool_calls": JUNK,
    },
)
ITEM = st.fixed_dictionaries(
    {"type": st.sampled_from(["message", "reasoning", "function_call", "function_call_output"]) | JUNK},
    optional={
        "role": st.sampled_from(["user", "assistant"]) | JUNK,
        **dict.fromkeys(("content", "output", "arguments", "call_id", "name", "summary"), TEXT | JUNK),
    },
)
SMALL = st.integers(1, 6)
COMMON: dict[str, st.SearchStrategy[Any]] = {
    "model": st.sampled_from(["model", "", "other", None]),
    "max_tokens": SMALL | INTEGERS,
    "temperature": st.sampled_from([0, 0.5, 1, 2]) | NUMBERS,
    "top_p": NUMBERS,
    "min_p": NUMBERS,
    "top_k": INTEGERS,
    "n": st.integers(1, 4) | INTEGERS,
    "seed": INTEGERS,
    "presence_penalty": NUMBERS,
    "frequency_penalty": NUMBERS,
    "repetition_penalty": NUMBERS,
    "logit_bias": st.dictionaries(st.integers(0, 4100).map(str) | WORDS, NUMBERS, max_size=4),
    "stop": st.lists(st.sampled_from(["a", "th", "ing", "é"]), max_size=5) | WORDS,
    "stop_token_ids": IDS,
    "ignore_eos": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "min_tokens": st.integers(0, 4) | INTEGERS,
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({}, optional={"include_usage": JUNK, "continuous_usage_stats": JUNK}),
    "priority": INTEGERS,
    "user": WORDS,
    "deadline_ms": INTEGERS,
    "cache_salt": WORDS,
    "prompt_cache_retention": st.sampled_from(["in_memory", "24h", "none", "week"]),
    "request_id": WORDS,
    "add_special_tokens": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "response_format": st.fixed_dictionaries({"type": st.sampled_from(["text", "json_object"])}),
    "best_of": INTEGERS,
    "metadata": JUNK,
}
COMPLETION = COMMON | {
    "prompt": TEXT | IDS | st.lists(TEXT, max_size=3) | st.lists(IDS, max_size=3) | JUNK,
    "logprobs": st.integers(0, 20) | INTEGERS,
    "echo": st.booleans(),
    "suffix": WORDS,
}
CHAT = COMMON | {
    "messages": st.lists(MESSAGE, max_size=4) | JUNK,
    "logprobs": st.booleans(),
    "top_logprobs": st.integers(0, 20) | INTEGERS,
    "max_completion_tokens": SMALL | INTEGERS,
    "add_generation_prompt": st.booleans(),
    "continue_final_message": st.booleans(),
    "chat_template_kwargs": st.dictionaries(WORDS, JUNK, max_size=2),
    "tools": JUNK | st.just([{"type": "function", "function": {"name": "f"}}]),
    "tool_choice": st.sampled_from(["none", "auto", "required", {"type": "function", "function": {"name": "f"}}])
    | JUNK,
}
RESPONSE = COMMON | {
    "input": TEXT | st.lists(ITEM | MESSAGE, max_size=4) | JUNK,
    "instructions": TEXT | JUNK,
    "max_output_tokens": SMALL | INTEGERS,
    "text": st.fixed_dictionaries({"format": st.fixed_dictionaries({"type": st.just("json_object")}) | JUNK}) | JUNK,
    "tools": JUNK | st.just([{"type": "function", "name": "f"}]),
    "tool_choice": st.sampled_from(["none", "auto", "required", {"type": "function", "name": "f"}]) | JUNK,
    "reasoning": JUNK,
    "include": JUNK,
    "store": st.booleans(),
}
TOKENIZE = {
    "model": COMMON["model"], "prompt": TEXT | JUNK, "messages": CHAT["messages"], "add_special_tokens": st.booleans(),
    "return_token_strs": st.booleans(),
}  # fmt: skip
DETOKENIZE = {"model": COMMON["model"], "tokens": IDS | JUNK}
BASES: dict[str, tuple[dict[str, Any], dict[str, st.SearchStrategy[Any]]]] = {
    "/v1/completions": ({"prompt": [7, 8, 9], "max_tokens": 3}, COMPLETION),
    "/v1/chat/completions": ({"messages": [{"role": "user", "content": "Speak"}], "max_tokens": 3}, CHAT),
    "/v1/responses": ({"input": "Speak", "max_output_tokens": 3}, RESPONSE),
    "/tokenize": ({"prompt": "In the beginning"}, TOKENIZE),
    "/detokenize": ({"tokens": [7, 8]}, DETOKENIZE),
}
"""For each path: a right body, and what its fields are replaced by."""
GETS = (
    "/health", "/health/live", "/health/ready", "/metrics", "/version", "/v1/models", "/v1/models/model",
    "/tokenizer_info", "/v1/requests/x", "/v1/requests/cmpl-x", "/openapi.json", "/", "/v1", "/v1/models/%00",
    "/v1/requests/%ff%fe", "/..%2f", "/tokenizer_info?model=other", "/v1/requests/" + "y" * 300,
)  # fmt: skip
HEADERS = st.sampled_from([
    ("X-Request-Id", "mine"), ("X-Request-Id", "\x80"), ("X-Request-Id", "z" * 400), ("X-Tenant", "t"),
    ("X-Tenant", "a b"), ("X-Tenant", "q" * 300), ("Accept-Encoding", "gzip"),
    ("Authorization", "Bearer none"), ("Expect", "100-continue"),
    ("Content-Encoding", "gzip"), FOREIGN, ("Origin", "http://localhost"), ("X-Request-Timeout", "nan"),
])  # fmt: skip


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    body: bytes
    headers: tuple[tuple[str, str], ...]

    def raw(self) -> bytes:
        lines = [f"{self.method} {self.path} HTTP/1.1", "Host: localhost", "Connection: close"]
        lines += [f"{name}: {value}" for name, value in self.headers]
        if self.body or self.method == "POST":
            lines += ["Content-Type: application/json", f"Content-Length: {len(self.body)}"]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + self.body


@st.composite
def posts(draw: st.DrawFn) -> Request:
    """A right body with up to three fields replaced, and sometimes other bytes."""
    path = draw(st.sampled_from(sorted(BASES)))
    base, fields = BASES[path]
    body: Any = dict(base)
    for name in draw(st.lists(st.sampled_from(sorted(fields)), max_size=3)):
        body[name] = draw(JUNK) if draw(st.integers(0, 4)) == 0 else draw(fields[name])
    if draw(st.integers(0, 19)) == 0:
        body = draw(JUNK)
    # Numbers and half characters that JSON has no room for are written nevertheless.
    data = json.dumps(body).encode()
    if draw(st.integers(0, 19)) == 0:
        place = draw(st.integers(0, len(data)))
        data = data[:place] + draw(st.binary(max_size=4)) + data[place + draw(st.integers(0, 3)) :]
    return Request("POST", path, data, tuple(draw(st.lists(HEADERS, max_size=2))))


@st.composite
def others(draw: st.DrawFn) -> Request:
    """Any method on any path."""
    method = draw(st.sampled_from(["GET", "GET", "GET", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "POST", "BREW"]))
    path = draw(st.sampled_from([*GETS, *sorted(BASES)]))
    return Request(method, path, draw(st.binary(max_size=3)), tuple(draw(st.lists(HEADERS, max_size=2))))


REQUESTS = st.integers(0, 9).flatmap(lambda kind: others() if kind == 0 else posts())


def send(port: int, request: Request) -> bytes:
    """The whole answer. Raises TimeoutError when it has no end."""
    deadline = time.monotonic() + PATIENCE_S
    answer = b""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection:
        connection.sendall(request.raw())
        while time.monotonic() < deadline:
            piece = connection.recv(1 << 16)
            if not piece:
                return answer
            answer += piece
    raise TimeoutError("the answer has no end")


def fault(request: Request, answer: bytes) -> str | None:
    """What is wrong with an answer."""
    head, _, body = answer.removeprefix(CONTINUE).partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 "):
        return f"no answer: {answer[:200]!r}"
    status = int(head.split()[1])
    if status not in (FINE | {403} if FOREIGN in request.headers else FINE):
        return f"status {status}: {body[:500]!r}"
    if b'"error":' in body and b'"code":"failed"' in body:
        return f"it failed on the executor: {body[-500:]!r}"
    if status == 200 or request.method == "HEAD":
        return None
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return (
            None if body == b"Invalid HTTP request received." else f"status {status} without an error: {body[:300]!r}"
        )
    return None if isinstance(message, str) and message else "an error without a message"


def fuzz(port: int, count: int, start: int) -> str | None:
    """Send so many; returns what is wrong with the simplest request that was found to fail."""

    def attempt(request: Request) -> None:
        found = fault(request, send(port, request))
        assert found is None, f"{request}: {found}"

    return simplest_failure(REQUESTS, attempt, count, start, (AssertionError, OSError))


async def run(services: Services, count: int, start: int, num_described: int = 0) -> list[str]:
    """Fuzz services that run. Returns what is wrong.

    `num_described`: how many requests are made from the service's own description.
    """
    pids = services.pids()
    right = await _answer(services)
    found: list[str] = []
    if count:
        fault_found = await asyncio.to_thread(fuzz, services.port, count, start)
        found += [] if fault_found is None else [fault_found]
    if num_described:
        wrong, answers = await asyncio.to_thread(described.fuzz, services.port, num_described, start)
        found += wrong
        for name, statuses in answers.items():
            print(name, ", ".join(f"{status}: {times}" for status, times in sorted(statuses.items())))
    if services.pids() != pids:
        found.append("a process has ended")
    if await _answer(services) != right:
        found.append("a plain request is answered otherwise than before")
    found += await services.busy()
    log = (services.folder / "scheduler.log").read_text(errors="replace")
    return found + (["the scheduler's log has a traceback"] if "Traceback" in log else [])


async def _answer(services: Services) -> Any:
    body = json.dumps({"prompt": [5, 6], "max_tokens": 9, "temperature": 0}).encode()
    answer = await exchange(services.port, "POST", "/v1/completions", body)
    return answer.json["choices"] if answer.status == 200 else answer.status


def settings(folder: Path) -> Settings:
    """Of services whose executor costs nothing, with batches."""
    return Settings(
        folder,
        executors=1,
        frontends=1,
        delay_s=0.0,
        patience_s=30.0,  # the relay has little time while requests are made
        scheduler_flags=["--batch-dir", str(folder / "batches")],
        executor_flags=["--no-verify"],
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.http", description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--schemathesis", type=int, default=0, metavar="N", help="instead, N requests made from /openapi.json"
    )
    options = parser.parse_args(arguments)
    count = 0 if options.schemathesis else options.requests
    with tempfile.TemporaryDirectory(prefix="gilir-http-") as folder:
        work = partial(run, count=count, start=options.seed, num_described=options.schemathesis)
        found = asyncio.run(served(settings(Path(folder)), work))
    for text in found:
        print(text)
    print(f"requests {count or options.schemathesis} wrong {len(found)}")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
