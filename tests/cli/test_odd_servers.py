"""Servers that are no such servers: every command that talks to one ends in a plain line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.cli.stub_server import Stub

ODD: tuple[Any, ...] = (None, 5, [1], "text", {}, {"data": None}, {"data": [5]}, {"data": [{}], "paused": 5})
CHUNKS: tuple[Any, ...] = (
    *(None, 5, [1], "text", {"usage": 5}, {"choices": 5}, {"choices": [5]}),
    *({"choices": [{"delta": {"content": 5}}]}, {"choices": [{"delta": [1]}]}),
)
EVENTS: tuple[Any, ...] = (5, [1], {}, {"lanes": 5}, {"lanes": [{}], "waiting": [], "num_waiting": {}}, {"rows": 5})


def streamed(*events: Any) -> Callable[[Any], tuple[int, Iterator[Any]]]:
    return lambda _body: (200, iter(events))


@pytest.mark.parametrize("action", [[], ["drain", "gpu-0"], ["pause", "--model", "m"]])
def test_no_admin_api(stub: Stub, fails: Callable[..., str], action: list[str]) -> None:
    for odd in ODD:
        for route in ("GET /admin/executors", "POST /admin/executors/gpu-0/drain", "POST /admin/models/m/pause"):
            stub.say(route, 200, odd)
        assert stub.url in fails("executors", *action, "--admin-url", stub.url)


def test_no_chat(stub: Stub, fails: Callable[..., str]) -> None:
    for odd in CHUNKS:
        stub.replies["POST /v1/chat/completions"] = streamed(odd, "[DONE]")
        assert stub.url in fails("chat", "--url", stub.url, "hello")
    for cut in ((), ({"choices": [{"delta": {"content": "all that"}}]},)):
        stub.replies["POST /v1/chat/completions"] = streamed(*cut)
        assert "broke off" in fails("chat", "--url", stub.url, "hello")


def test_no_live_page(stub: Stub, fails: Callable[..., str]) -> None:
    for odd in EVENTS:
        for name in ("status", "rows", "trouble"):
            stub.replies["GET /dashboard/events"] = streamed((name, odd))
            fails("top", "--once", "--url", stub.url)


def test_no_completions(stub: Stub, fails: Callable[..., str]) -> None:
    for odd in CHUNKS:
        stub.replies["POST /v1/completions"] = streamed(odd, "[DONE]")
        fails("bench", "--url", stub.url, "--requests", "1")
