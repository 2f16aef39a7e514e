"""Requests exactly as clients send them (tests/clients/shapes): each is answered with what that client reads."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from client_readers import READERS
from fake_core import Answer, FakeCore
from fastapi.testclient import TestClient
from frontend_service import error_of, wait_until
from tokenizers_for_tests import TOOL_CHAT, byte_level, card
from tooled import AllCompile

from common.wire import Submit
from scheduler_svc.frontend.app import create_app
from scheduler_svc.frontend.settings import FrontendSettings

SHAPES = Path(__file__).parents[1] / "clients" / "shapes"
NAME, TEXT = "default_model", " one two three"
TOKENIZER, CONFIG = byte_level()


def shapes(paths: tuple[str, ...]) -> list[Any]:
    """The recorded requests to these paths, each under its client's name and what it is."""
    found = []
    for file in sorted(SHAPES.glob("*.json")):
        for request in json.loads(file.read_text())["requests"]:
            if request["path"] in paths:
                found.append(pytest.param(file.stem, request, id=f"{file.stem}: {request['about']}"))
    return found


class Served:
    """A frontend in this process, in front of a scripted core that says `text` to everything."""

    def __init__(self, client: TestClient, core: FakeCore) -> None:
        self._client, self._core, self.text = client, core, TEXT
        core.script = lambda request, _stream: self._answer(request)

    def send(self, request: Any) -> httpx.Response:
        body = None if request["body"] is None else json.dumps(request["body"]).encode()
        return self._client.request(request["method"], request["path"], content=body, headers=request["headers"])

    def _answer(self, request: Submit) -> Answer:
        ids = [*TOKENIZER.encode(self.text, add_special_tokens=False).ids, TOKENIZER.token_to_id("<|im_end|>")]
        asked = request.params.logprobs
        scores = [[(token, -0.5), (token, -0.5)] for token in ids] if asked is not None else []
        prompt: list[Any] = []
        if request.params.prompt_logprobs is not None:
            prompt = [[(int(token), -2.0), (int(token), -2.0)] for token in request.prompt[1:]]
        return Answer(ids, scores=scores, prompt_scores=prompt)


@pytest.fixture(scope="module")
def module_served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    address = f"ipc://{tmp_path_factory.mktemp('ipc')}/{uuid.uuid4().hex[:8]}"
    model = card(NAME, (TOKENIZER, CONFIG), TOOL_CHAT, max_model_len=4096, vocab_size=4096)
    core = FakeCore(address, [model])
    app = create_app(FrontendSettings(core=address))
    app.state.frontend.grammars = AllCompile()
    with TestClient(app, base_url="http://localhost") as client:
        wait_until(lambda: client.get("/health").status_code == 200 and client.get("/v1/models").json()["data"] != [])
        yield Served(client, core)
    core.close()


@pytest.fixture
def served(module_served: Served) -> Served:
    module_served.text = TEXT
    return module_served


@pytest.mark.parametrize(("client", "request_"), shapes(("/v1/completions", "/v1/chat/completions")))
def test_a_generation_is_read(served: Served, client: str, request_: Any) -> None:
    body = request_["body"]
    calls = bool(body.get("tools")) and body["messages"][-1]["role"] != "tool"
    forced = isinstance(body.get("tool_choice"), dict)
    if calls:
        name = body["tools"][0]["function"]["name"]
        # A forced choice bounds the answer to calls as JSON, without markup.
        free = '<tool_call>{"name": "NAME", "arguments": {}}</tool_call>'
        bounded = '[{"name": "NAME", "parameters": {}}]'
        served.text = (bounded if forced else free).replace("NAME", name)
    response = served.send(request_)
    assert response.status_code == 200, response.text
    taken = READERS[client](response)
    if body.get("echo"):
        assert taken.text.endswith(TOKENIZER.decode(TOKENIZER.encode(TEXT, add_special_tokens=False).ids[:1]))
    elif calls:
        assert taken.text == "" and taken.finish_reason == ("stop" if forced else "tool_calls")
        assert taken.calls == [(name, "{}")]
    else:
        assert taken.text == TEXT
    told = not body.get("stream") or body.get("stream_options", {}).get("include_usage")
    if taken.completion_tokens is not None:
        assert told and taken.prompt_tokens and 0 < taken.completion_tokens <= 100
    elif client != "lm_eval":
        assert not told
    # The first event may already be the first token's: it is sent when there is one.
    assert taken.first_piece <= 1


@pytest.mark.parametrize(("client", "request_"), shapes(("/tokenizer_info", "/tokenize", "/detokenize")))
def test_the_remote_tokenizer(served: Served, client: str, request_: Any) -> None:
    answer = served.send(request_).json()
    if request_["path"] == "/tokenizer_info":
        assert answer["eos_token"] == "<|im_end|>" and answer["chat_template"] == TOOL_CHAT
    elif request_["path"] == "/tokenize":
        assert answer["tokens"] == TOKENIZER.encode(request_["body"]["prompt"], add_special_tokens=False).ids
    else:
        assert answer["prompt"] == TOKENIZER.decode(request_["body"]["tokens"], skip_special_tokens=False)


@pytest.mark.parametrize(("client", "request_"), shapes(("/health", "/v1/models", "/metrics")))
def test_what_is_asked_before_a_run(served: Served, client: str, request_: Any) -> None:
    response = served.send(request_)
    assert response.status_code == 200
    if request_["path"] == "/v1/models":
        (model,) = response.json()["data"]
        assert model["id"] == model["root"] == NAME and model["object"] == "model"
    elif request_["path"] == "/metrics":
        assert response.headers["content-type"].startswith("text/plain")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_mistake_is_told_as_all_clients_read_it(served: Served, path: str) -> None:
    """Under `error`, with a message and a code; openai-python takes the class of its exception from the status."""
    fields = {"prompt": "Hello"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "Hello"}]}
    request = {"method": "POST", "path": path, "headers": {}, "body": {"model": "no-such-model", **fields}}
    assert error_of(served.send(request), 404)["code"] == "model_not_found"
    request["body"] = {"model": NAME, "max_tokens": 10**6, **fields}
    assert error_of(served.send(request), 400)["code"] == "context_length_exceeded"
