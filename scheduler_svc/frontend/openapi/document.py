"""The whole document, for a frontend with its settings."""

from __future__ import annotations

from typing import Any

from scheduler_svc.frontend import auth
from scheduler_svc.frontend.openapi import answers, batching, generating, operations, responding, tokenizing
from scheduler_svc.frontend.openapi.schemas import STRING, Schema, ref
from scheduler_svc.frontend.settings import FrontendSettings

DIALECT = "https://json-schema.org/draft/2020-12/schema"
HEADERS: dict[str, Any] = {
    "X-Request-Id": {"description": "The request's id.", "required": True, "schema": STRING},
    "Retry-After": {
        "description": "Whole seconds after which another try makes sense.",
        "schema": {"type": "integer", "minimum": 1},
    },
    "WWW-Authenticate": {"description": "As RFC 6750 tells.", "required": True, "schema": STRING},
}
TOLD_WITH = {401: "WWW-Authenticate", 429: "Retry-After", 503: "Retry-After"}
"""Headers of errors."""


def build(settings: FrontendSettings, version: str, *, with_keys: bool) -> dict[str, Any]:
    """The document. `with_keys`: API keys are asked for."""
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Gilir", "version": version, "description": _description(settings)},
        "jsonSchemaDialect": DIALECT,
        "paths": operations.paths(),
        "components": {
            "schemas": _schemas(),
            "parameters": operations.parameters(),
            "headers": HEADERS,
            "responses": {f"Error{code}": _error(code, note) for code, note in operations.ERRORS.items()},
        },
    }
    free = auth.open_paths(settings.open_metrics)
    if with_keys:
        _ask_for_keys(document, free)
    elif not settings.allow_no_api_keys:
        _tell_of(document, 403, free)
    return document


def _description(settings: FrontendSettings) -> str:
    return (
        "OpenAI's REST API with the extra fields that users of vLLM know. A field that is null is absent, and one that "
        "is not described is ignored; nothing is coerced: `5.0` is no integer. "
        f"A body has up to {settings.max_body_mb} MiB, an uploaded file up to {settings.batch_max_file_mb} MiB, "
        f"a request up to {settings.max_streams_per_request} sequences."
    )


def _schemas() -> dict[str, Schema]:
    return {
        "CreateCompletion": generating.completion_body(),
        "CreateChatCompletion": generating.chat_body(),
        "Message": generating.message_schema(),
        "TokenizeText": tokenizing.tokenize_text(),
        "TokenizeMessages": tokenizing.tokenize_messages(),
        "Detokenize": tokenizing.detokenize_body(),
        "Live": answers.status("live"),
        "NotLive": answers.status("not live"),
        "Ready": answers.status("ready"),
        "NotReady": answers.status("not ready"),
        **answers.schemas(),
        **batching.schemas(),
        **responding.schemas(),
    }


def _error(code: int, note: str) -> dict[str, Any]:
    names = ["X-Request-Id", *([TOLD_WITH[code]] if code in TOLD_WITH else [])]
    headers = {name: {"$ref": f"#/components/headers/{name}"} for name in names}
    return {"description": note, "headers": headers, "content": {"application/json": {"schema": ref("Error")}}}


def _ask_for_keys(document: dict[str, Any], free: frozenset[str]) -> None:
    """Every operation but those on `free` paths needs a key."""
    document["components"]["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer", "description": "An API key."}
    }
    document["security"] = [{"bearer": []}]
    for path in free & document["paths"].keys():
        for operation in document["paths"][path].values():
            operation["security"] = []
    _tell_of(document, 401, free)


def _tell_of(document: dict[str, Any], code: int, free: frozenset[str]) -> None:
    """Every operation but those on `free` paths may be answered by this error, whatever it is."""
    for path, methods in document["paths"].items():
        if path not in free:
            for operation in methods.values():
                operation["responses"][str(code)] = {"$ref": f"#/components/responses/Error{code}"}
