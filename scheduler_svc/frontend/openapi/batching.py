"""Bodies and answers of `/v1/files` and `/v1/batches`."""

from __future__ import annotations

from scheduler_svc.batches.input import ENDPOINTS
from scheduler_svc.batches.records import Status
from scheduler_svc.frontend.batching import routes, upload
from scheduler_svc.frontend.openapi.schemas import (
    COUNT,
    STRING,
    UNIX_TIME,
    Schema,
    array,
    body,
    choice,
    constant,
    field,
    nullable,
    record,
    ref,
)

EXPIRY_S: Schema = {"type": "integer", "minimum": upload.MIN_EXPIRY_S, "maximum": upload.MAX_EXPIRY_S}
TIME = nullable(UNIX_TIME)
NOTES = {
    "input_file_id": "A file that was uploaded with the purpose batch.",
    "endpoint": "The route that answers each line.",
    "completion_window": "A number of m, h or d, up to 30d, as in 24h.",
    "metadata": "Comes back with the batch.",
    "output_expires_after": "When the output file is deleted; both or neither of the two.",
}


def schemas() -> dict[str, Schema]:
    """The components, by name."""
    return {
        "UploadFile": upload_form(),
        "CreateBatch": batch_body(),
        "File": _file(),
        "FileList": _list("File"),
        "FileDeleted": record({"id": STRING, "object": constant("file"), "deleted": constant(True)}),
        "Batch": _batch(),
        "BatchList": _list("Batch"),
    }


def upload_form() -> Schema:
    """A form of `multipart/form-data`."""
    return record(
        {
            "file": {
                "type": "string",
                "contentMediaType": "application/octet-stream",
                "minLength": 1,
                "description": "JSON Lines, one request each; with a filename.",
            },
            "purpose": constant(upload.PURPOSE),
            "expires_after[anchor]": constant(upload.ANCHOR),
            "expires_after[seconds]": EXPIRY_S,
        },
        required=("file", "purpose"),
        dependentRequired={
            "expires_after[anchor]": ["expires_after[seconds]"],
            "expires_after[seconds]": ["expires_after[anchor]"],
        },
    )


def batch_body() -> Schema:
    expiry = record({"anchor": choice((upload.ANCHOR, None)), "seconds": nullable(EXPIRY_S)}, required=())
    metadata: Schema = {
        "type": "object",
        "maxProperties": routes.MAX_METADATA,
        "propertyNames": {"maxLength": routes.MAX_KEY},
        "additionalProperties": {"type": "string", "maxLength": routes.MAX_VALUE},
    }
    properties = {
        routes.INPUT_FILE_ID.name: field(routes.INPUT_FILE_ID),
        routes.ENDPOINT.name: choice(ENDPOINTS),
        routes.WINDOW.name: field(routes.WINDOW),
        "metadata": metadata,
        "output_expires_after": expiry,
    }
    needed = (routes.INPUT_FILE_ID.name, routes.ENDPOINT.name, routes.WINDOW.name)
    return body(properties, needed, NOTES)


def _list(name: str) -> Schema:
    ids = nullable(STRING)
    return record(
        {
            "object": constant("list"),
            "data": array(ref(name)),
            "first_id": ids,
            "last_id": ids,
            "has_more": {"type": "boolean"},
        }
    )


def _file() -> Schema:
    return record(
        {
            "id": STRING,
            "object": constant("file"),
            "bytes": COUNT,
            "created_at": UNIX_TIME,
            "expires_at": TIME,
            "filename": STRING,
            "purpose": choice((upload.PURPOSE, f"{upload.PURPOSE}_output")),
            "status": constant("processed"),
            "status_details": {"type": "null"},
        }
    )


def _batch() -> Schema:
    error = record({"code": STRING, "line": nullable(COUNT), "message": STRING, "param": nullable(STRING)})
    usage = record(
        {
            "input_tokens": COUNT,
            "input_tokens_details": record({"cached_tokens": COUNT}),
            "output_tokens": COUNT,
            "output_tokens_details": record({"reasoning_tokens": COUNT}),
            "total_tokens": COUNT,
        }
    )
    times = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
    return record(
        {
            "id": STRING,
            "object": constant("batch"),
            "endpoint": choice(ENDPOINTS),
            "model": nullable(STRING),
            "errors": nullable(record({"object": constant("list"), "data": array(error)})),
            "input_file_id": STRING,
            "completion_window": STRING,
            "status": choice(status.value for status in Status),
            "output_file_id": nullable(STRING),
            "error_file_id": nullable(STRING),
            "created_at": UNIX_TIME,
            "expires_at": UNIX_TIME,
            **{f"{state}_at": TIME for state in times},
            "request_counts": record({"total": COUNT, "completed": COUNT, "failed": COUNT}),
            "usage": usage,
            "metadata": {"type": ["object", "null"], "additionalProperties": STRING},
        }
    )
