"""What the API's description says of routes and answers is what there is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest
from described_frontend import BODIES, MESSAGES, WINDOW, World, open_world
from fake_core import Answer
from fastapi import FastAPI
from frontend_service import BYTE_LEVEL, events
from tokenizers_for_tests import byte_level

from common.wire import Account, EndReason, SequenceAccount
from scheduler_svc.frontend.openapi.document import build
from scheduler_svc.frontend.settings import FrontendSettings


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with open_world(tmp_path_factory.mktemp("openapi")) as world:
        yield world


def test_every_route_is_described_and_no_other(world: World) -> None:
    app = world.client.app
    assert isinstance(app, FastAPI)
    served = app.openapi()["paths"]  # what FastAPI itself knows of them
    assert {path: set(methods) for path, methods in served.items()} == {
        path: set(methods) for path, methods in world.document["paths"].items()
    }


# --- answers ---


def strict(schema: Any) -> Any:
    """The same, with no property that is not described."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: strict(value) for key, value in schema.items()}
    if schema.get("type") == "object" and "properties" in schema:
        closed.setdefault("additionalProperties", False)
    return closed


def check(world: World, name: str, value: Any) -> None:
    """It is as described, and nothing more."""
    schemas = strict(world.schemas)
    jsonschema_rs.validator_for({**schemas[name], "components": {"schemas": schemas}}).validate(value)


SCORED = Answer([5, 6, 7], scores=[[(5, -0.5), (9, -1.0)], [(6, -0.25), (6, -0.25)], [(7, -0.1), (8, -2.0)]])


@pytest.mark.parametrize(
    ("body", "name"), [("CreateCompletion", "Completion"), ("CreateChatCompletion", "ChatCompletion")]
)
@pytest.mark.parametrize("scored", [True, False])
def test_generated_answers_are_as_described(world: World, body: str, name: str, scored: bool) -> None:
    path, asked = BODIES[body]
    world.core.answer(SCORED if scored else Answer([5], EndReason.STOP_TOKEN), Answer([5, 6], EndReason.LENGTH))
    chat = {"logprobs": True, "top_logprobs": 1} if "Chat" in body else {"logprobs": 1}
    asked = {**asked, "n": 2, "max_tokens": 3, **(chat if scored else {"stop_token_ids": [5]})}
    check(world, name, world.client.post(path, json=asked).json())
    told = {"include_usage": True, "continuous_usage_stats": scored}
    streamed = world.client.post(path, json={**asked, "stream": True, "stream_options": told})
    chunks = events(streamed)
    for chunk in chunks:
        check(world, f"{name}Chunk", chunk)
    assert len(chunks) >= 3
    content = world.document["paths"][path]["post"]["responses"]["200"]["content"]
    assert set(content) == {"application/json", "text/event-stream"}


TOLD = {"return_token_ids": True, "return_tokens_as_token_ids": True, "max_tokens": 100}


@pytest.mark.parametrize(
    ("body", "name"), [("CreateCompletion", "Completion"), ("CreateChatCompletion", "ChatCompletion")]
)
def test_answers_with_token_ids_and_scores_are_as_described(world: World, body: str, name: str) -> None:
    path, asked = BODIES[body]
    scores = [[(5, -0.5), (9, -0.25)], [(6, -float("inf"))]]
    world.core.answer(Answer([5, 6], prompt_scores=scores))
    check(world, name, world.client.post(path, json={**asked, **TOLD, "prompt_logprobs": 1}).json())
    for chunk in events(world.client.post(path, json={**asked, **TOLD, "stream": True, "n": 2})):
        check(world, f"{name}Chunk", chunk)


def test_answers_with_calls_are_as_described(world: World) -> None:
    path, asked = BODIES["CreateChatCompletion"]
    text = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    world.core.answer(Answer(byte_level()[0].encode(text).ids))
    asked = {**asked, "tools": [{"type": "function", "function": {"name": "f"}}]}
    answer = world.client.post(path, json=asked).json()
    check(world, "ChatCompletion", answer)
    assert answer["choices"][0]["finish_reason"] == "tool_calls" and answer["choices"][0]["message"]["tool_calls"]
    for chunk in events(world.client.post(path, json={**asked, "stream": True})):
        check(world, "ChatCompletionChunk", chunk)


@pytest.mark.parametrize("reason", [EndReason.EOS, EndReason.LENGTH, EndReason.FAILED])
def test_responses_are_as_described(world: World, reason: EndReason) -> None:
    path, asked = BODIES["CreateResponse"]
    text = 'Well. <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    ids = byte_level()[0].encode(text).ids
    scores = [[(token, -0.5), (token, -0.5)] for token in ids]
    world.core.answer(Answer(ids, reason, message="because", scores=scores))
    world.core.interval_s = 0.01
    asked = {**asked, "tools": [{"type": "function", "name": "f"}], "metadata": {"a": "b"}}
    asked |= {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    answer = world.client.post(path, json=asked)
    check(world, "Response" if answer.status_code == 200 else "Error", answer.json())
    lines = world.client.post(path, json={**asked, "stream": True}).text.split("\n")
    told = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    for event in told:
        check(world, "ResponseEvent", event)
    assert len({event["type"] for event in told}) >= 10
    world.core.reset()


def test_other_answers_are_as_described(world: World) -> None:
    sequence = SequenceAccount(0, "waiting", "seats", "", 1.0, {"seats": 1.0}, 0, 3, 0, 0, 0, 0)
    world.core.accounts["mine"] = Account(0, "m", 1, (sequence,))
    get, post = world.client.get, world.client.post
    for name, answer in (
        ("Model", get(f"/v1/models/{BYTE_LEVEL}")),
        ("ModelList", get("/v1/models")),
        ("Request", get("/v1/requests/cmpl-mine")),
        ("Tokenized", post("/tokenize", json={"prompt": "Hello", "return_token_strs": True})),
        ("Tokenized", post("/tokenize", json={"messages": MESSAGES})),
        ("Detokenized", post("/detokenize", json={"tokens": [5]})),
        ("Version", get("/version")),
        ("Load", get("/load")),
        ("Live", get("/health/live")),
        ("Ready", get("/health/ready")),
        ("Ready", get("/health")),
    ):
        assert answer.status_code == 200, answer.text
        check(world, name, answer.json())
    world.validator(world.schemas["TokenizerInfo"]).validate(get("/tokenizer_info").json())


def test_files_and_batches_are_as_described(world: World) -> None:
    get, post = world.client.get, world.client.post
    form = {"purpose": "batch", "expires_after[anchor]": "created_at"}
    seconds = world.schemas["UploadFile"]["properties"]["expires_after[seconds]"]

    def upload(expires_s: int) -> Any:
        data = {**form, "expires_after[seconds]": str(expires_s)}
        return post("/v1/files", files={"file": ("x.jsonl", b"{}")}, data=data)

    for wrong in (seconds["minimum"] - 1, seconds["maximum"] + 1):
        assert upload(wrong).status_code == 400
    file = upload(seconds["minimum"]).json()
    assert upload(seconds["maximum"]).status_code == 200
    check(world, "File", file)
    check(world, "FileList", get("/v1/files?limit=1").json())
    metadata = {"a": "b"}
    expiry = {"anchor": "created_at", "seconds": 3600}
    made = {**WINDOW, "input_file_id": file["id"], "metadata": metadata, "output_expires_after": expiry}
    batch = post("/v1/batches", json=made).json()
    check(world, "Batch", batch)
    check(world, "BatchList", get("/v1/batches").json())
    check(world, "Batch", post(f"/v1/batches/{batch['id']}/cancel").json())
    assert post("/v1/batches", json={**made, "output_expires_after": {**expiry, "seconds": "3600"}}).status_code == 400
    for path in ("/v1/files", "/v1/batches"):
        limit = next(p for p in world.document["paths"][path]["get"]["parameters"] if p.get("name") == "limit")[
            "schema"
        ]
        for value, status in ((limit["minimum"], 200), (limit["maximum"], 200), (0, 400), (limit["maximum"] + 1, 400)):
            assert get(f"{path}?limit={value}").status_code == status
    check(world, "FileDeleted", world.client.delete(f"/v1/files/{upload(3600).json()['id']}").json())


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        (EndReason.REJECTED, 400),
        (EndReason.QUEUE_FULL, 429),
        (EndReason.OVER_LIMIT, 429),
        (EndReason.FAILED, 500),
        (EndReason.NO_EXECUTOR, 503),
        (EndReason.TIMEOUT, 504),
    ],
)
def test_errors_are_as_described(world: World, reason: EndReason, status: int) -> None:
    world.core.answer(Answer([], reason, message="because", retry_after_s=7))
    answer = world.client.post("/v1/completions", json={"prompt": "Hello"})
    assert answer.status_code == status
    check(world, "Error", answer.json())
    described = world.document["paths"]["/v1/completions"]["post"]["responses"][str(status)]
    headers = world.document["components"]["responses"][described["$ref"].rsplit("/", 1)[1]]["headers"]
    told = {name for name in ("X-Request-Id", "Retry-After") if name.lower() in answer.headers}
    assert told == set(headers)


# --- the document itself ---


def refs(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from (value["$ref"],) if isinstance(value.get("$ref"), str) else ()
        for inner in value.values():
            yield from refs(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from refs(inner)


def test_the_document_is_whole(world: World) -> None:
    """Every reference leads somewhere, every component is used, every schema is one."""
    used = set(refs(world.document))
    components = {
        f"#/components/{kind}/{name}" for kind, named in world.document["components"].items() for name in named
    }
    # 401 is told of where keys are asked for.
    assert used | {"#/components/responses/Error401", "#/components/headers/WWW-Authenticate"} == components
    for schema in world.schemas.values():
        jsonschema_rs.meta.validate(schema)
    names = [one["operationId"] for methods in world.document["paths"].values() for one in methods.values()]
    assert len(names) == len(set(names))


def test_keys_are_told_of_where_they_are_asked_for() -> None:
    settings = FrontendSettings(core="ipc://nowhere", api_key="secret", open_metrics=True)  # type: ignore[arg-type]
    with_keys, without = (build(settings, "1", with_keys=asked) for asked in (True, False))
    assert with_keys["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"
    assert "security" not in without and "securitySchemes" not in without["components"]
    for path, methods in with_keys["paths"].items():
        is_open = path.startswith("/health") or path == "/metrics"
        for method, operation in methods.items():
            assert (operation.get("security", with_keys["security"]) == []) == is_open
            assert ("401" in operation["responses"]) != is_open and "403" not in operation["responses"]
            assert ("403" in without["paths"][path][method]["responses"]) != is_open


def test_no_403_is_told_of_where_everybody_may_ask() -> None:
    settings = FrontendSettings(core="ipc://nowhere", allow_no_api_keys=True)
    for methods in build(settings, "1", with_keys=False)["paths"].values():
        assert all(not {"401", "403"} & operation["responses"].keys() for operation in methods.values())


def test_it_is_built_once(world: World) -> None:
    kept = world.client.app.state.openapi  # type: ignore[attr-defined]
    assert world.client.get("/openapi.json").content == kept
    assert world.client.app.state.openapi is kept  # type: ignore[attr-defined]
