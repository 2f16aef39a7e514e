"""The operations: every public route with its parameters, body and answers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from scheduler_svc.frontend.batching import files, routes
from scheduler_svc.frontend.openapi.schemas import COUNT, STRING, Schema, choice, constant, record, ref, whole
from scheduler_svc.frontend.resuming.kept_stream import LAST_EVENT_ID
from scheduler_svc.frontend.scheduling import MAX_TIMEOUT_S, TENANT_HEADER, TENANT_PATTERN, TIMEOUT_HEADER
from scheduler_svc.frontend.serving import RESUMABLE_HEADER

Operation = dict[str, Any]

ERRORS = {
    400: "A mistake in the request; `param` names the field.",
    401: "No valid API key was given.",
    403: "No API keys are set, and it was not asked for by a program on this machine.",
    404: "There is no such thing, or none that this client may see.",
    408: "The body stopped coming.",
    410: "It was there, and is kept no more.",
    413: "The body is larger than it may be, or with an upload a tenant's files together are.",
    429: "The queue is full, or a limit of the API key is reached.",
    500: "It failed on the executors, or in the service.",
    503: "It cannot be served now: no executor serves the model, the service is stopping, or it is overloaded.",
    504: "The request took longer than it may.",
}
"""What the statuses of errors mean. Their bodies are alike."""
GENERATING = (400, 404, 408, 413, 429, 500, 503, 504)
TOKENIZING = (400, 404, 408, 413, 500, 503)
EVENT_ID: Schema = {"type": "integer", "minimum": 1, "description": "Of a resumable stream: the event's place in it."}
RESUMING = (400, 404, 410, 429, 500, 503, 504)
"""Of a stream that is taken up again: its own, and where the answer is an error that one."""
STORED = (400, 404, 500, 503)
"""Of the routes of files and batches; 404 also where batches are off."""


def parameter(name: str, where: str, schema: Schema, note: str) -> dict[str, Any]:
    return {"name": name, "in": where, "required": where == "path", "schema": schema, "description": note}


def parameters() -> dict[str, Any]:
    """The components, by name."""
    seconds: Schema = {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_TIMEOUT_S}
    tenant: Schema = {"type": "string", "pattern": whole(TENANT_PATTERN)}
    after: Schema = {"type": "string", "pattern": whole(f"(?:{files.ID_PATTERN})?")}
    resumable: Schema = {"type": "boolean", "default": False}
    model_note = "The model's name, slashes and all."
    return {
        "RequestId": parameter(
            "X-Request-Id", "header", STRING, "Names the request, where it is 1 to 200 printable ASCII characters."
        ),
        "Tenant": parameter(TENANT_HEADER, "header", tenant, "Whose request it is; with a tenant's key that tenant."),
        "Timeout": parameter(TIMEOUT_HEADER, "header", seconds, "Seconds from arrival after which it ends with 504."),
        "Resumable": parameter(
            RESUMABLE_HEADER,
            "header",
            resumable,
            "With stream=true: events have ids, from which on they can be resumed.",
        ),
        LAST_EVENT_ID: parameter(
            LAST_EVENT_ID, "header", COUNT, "Id of the last event that is known; else from the first."
        ),
        "After": parameter("after", "query", after, "Id of the last one of the page before."),
        "FileId": parameter("file_id", "path", STRING, "The file's id."),
        "BatchId": parameter("batch_id", "path", STRING, "The batch's id."),
        "ModelName": parameter("name", "path", STRING, model_note),
        "AnswerId": parameter("request_id", "path", STRING, "The request's id, with or without its answer's prefix."),
    }


def _use(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/parameters/{name}"}


def _limit(default: int, most: int) -> dict[str, Any]:
    schema = {"type": "integer", "minimum": 1, "maximum": most, "default": default}
    return parameter("limit", "query", schema, "How many to tell.")


def _ok(content: dict[str, Any], note: str = "The answer.", headers: Iterable[str] = ()) -> dict[str, Any]:
    used = {name: {"$ref": f"#/components/headers/{name}"} for name in ("X-Request-Id", *headers)}
    return {"description": note, "headers": used, "content": content}


def _json(schema: Schema) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _operation(
    name: str,
    tag: str,
    summary: str,
    good: dict[str, Any],
    errors: Iterable[int],
    *,
    uses: Iterable[str | dict[str, Any]] = (),
    body: dict[str, Any] | None = None,
) -> Operation:
    told = [_use(one) if isinstance(one, str) else one for one in ("RequestId", *uses)]
    responses = {"200": good} | {str(code): {"$ref": f"#/components/responses/Error{code}"} for code in errors}
    described: Operation = {"operationId": name, "tags": [tag], "summary": summary, "parameters": told}
    if body is not None:
        described["requestBody"] = {"required": True, "content": body}
    return {**described, "responses": responses}


def _events(*names: str) -> dict[str, Any]:
    """Server-sent events; the schema is that of each one, as is usual before OpenAPI 3.2 has a word for it."""
    data = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": [*map(ref, names), ref("Error")]},
    }
    note = "An error can only be the last but one. The last event's data is `[DONE]`."
    parts = {"data": {"anyOf": [constant("[DONE]"), data]}, "id": EVENT_ID}
    return {"schema": record(parts, required=("data",), description=note)}


def _generate(name: str, summary: str, body: str, answer: str) -> Operation:
    content = {**_json(ref(answer)), "text/event-stream": _events(f"{answer}Chunk")}
    good = _ok(content, "The whole answer, or with stream=true its events.")
    uses = ("Tenant", "Timeout", "Resumable")
    return _operation(name, "generate", summary, good, GENERATING, uses=uses, body=_json(ref(body)))


def _respond() -> Operation:
    event = {"type": "string", "contentMediaType": "application/json", "contentSchema": ref("ResponseEvent")}
    note = "The event is named as the type in its data."
    events = record({"event": STRING, "data": event, "id": EVENT_ID}, required=("event", "data"), description=note)
    content = {**_json(ref("Response")), "text/event-stream": {"schema": events}}
    good = _ok(content, "The whole response, or with stream=true its events.")
    uses, body = ("Tenant", "Timeout", "Resumable"), _json(ref("CreateResponse"))
    return _operation("createResponse", "generate", "Answer a conversation.", good, GENERATING, uses=uses, body=body)


def paths() -> dict[str, dict[str, Operation]]:
    """By path and method."""
    return {
        "/v1/completions": {
            "post": _generate("createCompletion", "Continue prompts.", "CreateCompletion", "Completion")
        },
        "/v1/chat/completions": {
            "post": _generate(
                "createChatCompletion", "Answer a conversation.", "CreateChatCompletion", "ChatCompletion"
            )
        },
        "/v1/responses": {"post": _respond()},
        **_tokenizer_paths(),
        **_look_paths(),
        **_file_paths(),
        **_batch_paths(),
        **_health_paths(),
    }


def _tokenizer_paths() -> dict[str, dict[str, Operation]]:
    def post(name: str, summary: str, body: Schema, answer: str) -> Operation:
        return _operation(name, "tokenize", summary, _ok(_json(ref(answer))), TOKENIZING, body=_json(body))

    texts = {"anyOf": [ref("TokenizeText"), ref("TokenizeMessages")]}
    model = parameter("model", "query", STRING, "Absent or empty: the only one that is served.")
    info = _ok(_json(ref("TokenizerInfo")))
    return {
        "/tokenize": {"post": post("tokenize", "Token ids of a text or of messages.", texts, "Tokenized")},
        "/detokenize": {"post": post("detokenize", "The text of token ids.", ref("Detokenize"), "Detokenized")},
        "/tokenizer_info": {
            "get": _operation(
                "tokenizerInfo", "tokenize", "The tokenizer's configuration.", info, STORED, uses=(model,)
            )
        },
    }


def _look_paths() -> dict[str, dict[str, Operation]]:
    def get(name: str, summary: str, answer: str, errors: Iterable[int], *uses: str) -> dict[str, Operation]:
        return {"get": _operation(name, "look", summary, _ok(_json(ref(answer))), errors, uses=uses)}

    return {
        "/v1/models": get("listModels", "The models that can be asked for.", "ModelList", (500, 503)),
        "/v1/models/{name}": get("getModel", "One model.", "Model", (404, 500, 503), "ModelName"),
        "/v1/requests/{request_id}": get(
            "getRequest", "Where a live request stands, and why it waits.", "Request", (404, 500, 503), "AnswerId"
        ),
        "/v1/requests/{request_id}/stream": {"get": _resume()},
    }


def _resume() -> Operation:
    events = {"text/event-stream": _events("CompletionChunk", "ChatCompletionChunk", "ResponseEvent")}
    query = parameter("last_event_id", "query", COUNT, "The same as the header, which goes before it.")
    good, uses = (
        _ok(events, "The events after that one, and those to come."),
        ("Tenant", "AnswerId", LAST_EVENT_ID, query),
    )
    operation = _operation("resumeStream", "look", "Take up a resumable stream again.", good, RESUMING, uses=uses)
    operation["responses"]["204"] = _ok({}, "That was the last event.")
    return operation


def _file_paths() -> dict[str, dict[str, Operation]]:
    def operation(name: str, summary: str, good: dict[str, Any], *uses: str | dict[str, Any]) -> Operation:
        return _operation(name, "batches", summary, good, STORED, uses=("Tenant", *uses))

    order = parameter("order", "query", {**choice(files.ORDERS), "default": "desc"}, "By time of creation.")
    purpose = parameter("purpose", "query", STRING, "Only files of this purpose.")
    page = ("After", _limit(files.MAX_FILES, files.MAX_FILES), order, purpose)
    form = {"multipart/form-data": {"schema": ref("UploadFile")}}
    errors = (400, 404, 408, 413, 500, 503)
    content = {"application/octet-stream": {"schema": {"type": "string", "contentMediaType": "application/jsonl"}}}
    file = _ok(_json(ref("File")))
    return {
        "/v1/files": {
            "post": _operation(
                "uploadFile", "batches", "Upload a batch's input.", file, errors, uses=("Tenant",), body=form
            ),
            "get": operation("listFiles", "List files.", _ok(_json(ref("FileList"))), *page),
        },
        "/v1/files/{file_id}": {
            "get": operation("getFile", "One file.", file, "FileId"),
            "delete": operation("deleteFile", "Delete a file.", _ok(_json(ref("FileDeleted"))), "FileId"),
        },
        "/v1/files/{file_id}/content": {
            "get": operation("getFileContent", "What a file holds.", _ok(content), "FileId")
        },
    }


def _batch_paths() -> dict[str, dict[str, Operation]]:
    batch, uses = _ok(_json(ref("Batch"))), ("Tenant", "BatchId")
    page = ("Tenant", "After", _limit(routes.DEFAULT_PAGE, routes.MAX_PAGE))
    batches, create = _ok(_json(ref("BatchList"))), _json(ref("CreateBatch"))
    errors = (400, 404, 408, 413, 500, 503)
    return {
        "/v1/batches": {
            "post": _operation(
                "createBatch", "batches", "Begin a batch.", batch, errors, uses=("Tenant",), body=create
            ),
            "get": _operation("listBatches", "batches", "List batches.", batches, STORED, uses=page),
        },
        "/v1/batches/{batch_id}": {"get": _operation("getBatch", "batches", "One batch.", batch, STORED, uses=uses)},
        "/v1/batches/{batch_id}/cancel": {
            "post": _operation("cancelBatch", "batches", "Stop a batch.", batch, STORED, uses=uses)
        },
    }


def _health_paths() -> dict[str, dict[str, Operation]]:
    def health(name: str, summary: str, answer: str) -> dict[str, Operation]:
        operation = _operation(name, "operate", summary, _ok(_json(ref(answer))), ())
        operation["responses"]["503"] = _ok(_json(ref(f"Not{answer}")), "It is not.")
        return {"get": operation}

    def get(name: str, summary: str, content: dict[str, Any]) -> dict[str, Operation]:
        return {"get": _operation(name, "operate", summary, _ok(content), (500,))}

    return {
        "/health/live": health("live", "Whether the scheduler's loop turns.", "Live"),
        "/health/ready": health("ready", "Whether a request would be served now.", "Ready"),
        "/health": health("health", "The same as /health/ready.", "Ready"),
        "/version": get("version", "The service's version.", _json(ref("Version"))),
        "/metrics": get("metrics", "Figures in Prometheus' text format.", {"text/plain": {"schema": STRING}}),
        "/load": get("load", "How many sequences wait or run.", _json(ref("Load"))),
        "/openapi.json": get("openapi", "This document.", _json({"type": "object"})),
    }
