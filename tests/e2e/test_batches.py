"""Files and batches over the real services, by OpenAI's own client, and what interactive requests notice of them."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from executor_svc.script import Script

PATIENCE_S = 60.0


def request_lines(count: int, *, max_tokens: int = 8, endpoint: str = "/v1/completions") -> bytes:
    rows = []
    for i in range(count):
        body: dict[str, Any] = {"model": "model", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        match endpoint:
            case "/v1/completions":
                body["prompt"] = f"Line {i} begins"
            case "/v1/chat/completions":
                body["messages"] = [{"role": "user", "content": f"Line {i} begins"}]
            case "/v1/responses":
                del body["max_tokens"]
                body |= {"input": f"Line {i} begins", "max_output_tokens": max_tokens}
        rows.append({"custom_id": f"line-{i}", "method": "POST", "url": endpoint, "body": body})
    return b"\n".join(json.dumps(row).encode() for row in rows)


@pytest.fixture(scope="module")
def stack(module_start: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Batches on, and a scripted executor with four seats that takes 5 ms for an iteration."""
    stack = module_start("--batch-dir", str(tmp_path_factory.mktemp("batches") / "data"))
    stack.fake(script=Script(delay_s=0.005), max_num_seqs=4, num_blocks=1024)
    stack.ready()
    return stack


@pytest.fixture(scope="module")
def client(stack: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def begin(client: openai.OpenAI, content: bytes, endpoint: Any = "/v1/completions") -> Any:
    file = client.files.create(file=("in.jsonl", io.BytesIO(content)), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")


def wait_for(client: openai.OpenAI, batch_id: str, *states: str) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while (batch := client.batches.retrieve(batch_id)).status not in states:
        assert time.monotonic() < deadline, batch
        time.sleep(0.05)
    return batch


def results(client: openai.OpenAI, file_id: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def test_the_official_client_runs_a_batch(stack: Any, client: openai.OpenAI) -> None:
    content = request_lines(20) + b"\n" + b'{"custom_id": "odd", "method": "GET"}\n' + request_lines(1).replace(
        b"line-0", b"hot").replace(b'"temperature": 0', b'"temperature": 9')  # fmt: skip
    file = client.files.create(file=("in.jsonl", io.BytesIO(content)), purpose="batch")
    assert (file.bytes, file.filename, file.purpose, file.status) == (len(content), "in.jsonl", "batch", "processed")
    assert (
        client.files.retrieve(file.id).to_dict() == file.to_dict() and client.files.content(file.id).content == content
    )
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h", metadata={"job": "nightly"}
    )
    assert batch.status == "validating" and batch.expires_at == batch.created_at + 86_400
    done = wait_for(client, batch.id, "completed")
    assert done.metadata == {"job": "nightly"} and done.model == "model"
    assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (22, 20, 2)
    rows = results(client, done.output_file_id)
    assert [row["custom_id"] for row in rows] == [f"line-{i}" for i in range(20)]
    assert all(row["response"]["status_code"] == 200 and row["error"] is None for row in rows)
    interactive = client.completions.create(
        model="model", prompt="Line 7 begins", max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
    )
    assert rows[7]["response"]["body"]["choices"][0]["text"] == interactive.choices[0].text
    assert done.usage.output_tokens == 160
    assert done.usage.input_tokens == sum(row["response"]["body"]["usage"]["prompt_tokens"] for row in rows)
    errors = {row["custom_id"]: row for row in results(client, done.error_file_id)}
    assert errors["odd"]["error"]["code"] == "invalid_method" and errors["odd"]["response"] is None
    assert errors["hot"]["response"]["status_code"] == 400
    assert errors["hot"]["response"]["body"]["error"]["param"] == "temperature"
    assert [found.to_dict() for found in client.batches.list(limit=1).data] == [done.to_dict()]
    assert {found.id for found in client.files.list(limit=2)} >= {file.id, done.output_file_id, done.error_file_id}
    assert client.files.list(purpose="batch", order="asc", limit=1).data[0].id == file.id
    text = stack.client.get("/metrics").text
    assert 'gilir_batch_lines{state="completed"} 20.0' in text and 'gilir_batch_lines{state="failed"} 2.0' in text
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(file.id)
    with pytest.raises(openai.BadRequestError, match="completed"):
        client.batches.cancel(batch.id)
    stack.until_idle()


def test_chats_responses_failures_and_cancelling(stack: Any, client: openai.OpenAI) -> None:
    chat = begin(client, request_lines(3, endpoint="/v1/chat/completions"), "/v1/chat/completions")
    done = wait_for(client, chat.id, "completed")
    assert all(
        row["response"]["body"]["choices"][0]["message"]["content"] for row in results(client, done.output_file_id)
    )
    content = request_lines(3, endpoint="/v1/responses")
    kept = request_lines(1, endpoint="/v1/responses").replace(b'"input"', b'"store": true, "input"')
    responses = begin(client, content + b"\n" + kept.replace(b"line-0", b"kept"), "/v1/responses")
    done = wait_for(client, responses.id, "completed")
    [refused] = results(client, done.error_file_id)
    assert (refused["custom_id"], refused["response"]["body"]["error"]["param"]) == ("kept", "store")
    bodies = [row["response"]["body"] for row in results(client, done.output_file_id)]
    assert [(body["object"], body["status"], len(body["output"])) for body in bodies] == [
        ("response", "incomplete", 1)
    ] * 3
    assert done.usage.output_tokens == 24 == sum(body["usage"]["output_tokens"] for body in bodies)
    failed = wait_for(client, begin(client, b"{\n[]").id, "failed")
    assert [error.line for error in failed.errors.data] == [1, 2] and failed.output_file_id is None
    # The first lines are short, the others never end.
    endless = begin(client, request_lines(4) + b"\n" + request_lines(40, max_tokens=900).replace(b"line-", b"long-"))
    deadline = time.monotonic() + PATIENCE_S
    while client.batches.retrieve(endless.id).request_counts.completed < 4:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    with pytest.raises(openai.BadRequestError, match="has not ended"):
        client.files.delete(endless.input_file_id)
    assert client.batches.cancel(endless.id).status in ("cancelling", "cancelled")
    cancelled = wait_for(client, endless.id, "cancelled")
    assert len(results(client, cancelled.output_file_id)) == 4 and cancelled.error_file_id is None
    stack.until_idle()


def test_interactive_requests_go_before_the_lines_of_a_batch(stack: Any, client: openai.OpenAI) -> None:
    batch = begin(client, request_lines(40, max_tokens=900))
    stack.until(lambda: stack.metric("vllm:num_requests_running") == 4, "the batch to fill the idle seats")
    assert stack.metric("gilir_live_sequences") == 4, "lines wait in the database, not in the queue"
    for _ in range(3):
        stack.text([5, 6, 7], 20)
    # 20 iterations at once: behind lines of 900, one of those would have ended first.
    assert client.batches.retrieve(batch.id).request_counts.completed == 0
    assert stack.metric("vllm:num_preemptions_total") >= 1
    assert stack.complete([5, 6, 7], 1, priority=2**31 - 1).status_code == 400
    client.batches.cancel(batch.id)
    wait_for(client, batch.id, "cancelled")
    stack.until_idle()
