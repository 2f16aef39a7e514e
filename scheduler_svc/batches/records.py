"""Files and batches as they are stored, and as the API writes them."""

from __future__ import annotations

import secrets
import time
from dataclasses import astuple, dataclass, fields
from enum import StrEnum
from typing import Any

import orjson


class Status(StrEnum):
    """OpenAI's states of a batch."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


LIVE = (Status.VALIDATING, Status.IN_PROGRESS, Status.CANCELLING)
"""States that the runner still has to do something about. Finalizing is one transaction, so no batch is found in it."""


class Outcome(StrEnum):
    """Which of a batch's two files the result of a line belongs to."""

    COMPLETED = "completed"
    FAILED = "failed"


def new_id(prefix: str) -> str:
    """An id that sorts after all that were made before: nanoseconds, then 64 random bits."""
    return f"{prefix}{time.time_ns():016x}{secrets.token_hex(8)}"


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A row of `files`, in the order of its columns. Times are Unix seconds."""

    id: str
    tenant: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int | None = None
    is_complete: int = 1
    batch_id: str | None = None
    outcome: str | None = None

    def row(self) -> tuple[Any, ...]:
        return astuple(self)

    def describe(self) -> dict[str, Any]:
        """OpenAI's `file` object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """A row of `batches`, in the order of its columns. Times are Unix seconds."""

    id: str
    tenant: str
    status: str
    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: str | None
    """JSON."""
    model: str | None
    """Of all lines, if they name the same one."""
    errors: str | None
    """JSON: a list of OpenAI's `batch_error` objects."""
    output_expires_s: int | None
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    expires_at: int
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    key_id: str = ""
    """The API key that its lines run under; empty where none was asked for."""

    def row(self) -> tuple[Any, ...]:
        return astuple(self)

    def describe(self) -> dict[str, Any]:
        """OpenAI's `batch` object."""
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "errors": None if self.errors is None else {"object": "list", "data": orjson.loads(self.errors)},
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "in_progress_at": self.in_progress_at,
            "expires_at": self.expires_at,
            "finalizing_at": self.finalizing_at,
            "completed_at": self.completed_at,
            "failed_at": self.failed_at,
            "expired_at": self.expired_at,
            "cancelling_at": self.cancelling_at,
            "cancelled_at": self.cancelled_at,
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "usage": {
                "input_tokens": self.prompt_tokens,
                "input_tokens_details": {"cached_tokens": self.cached_tokens},
                "output_tokens": self.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": self.prompt_tokens + self.completion_tokens,
            },
            "metadata": None if self.metadata is None else orjson.loads(self.metadata),
        }


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a batch that is still to be done. `place` and `length` in the input file, in bytes."""

    number: int
    custom_id: str
    place: int
    length: int


@dataclass(frozen=True, slots=True)
class Result:
    """How a line ended."""

    outcome: Outcome
    text: bytes
    """The line of the output or error file, without its line break."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


FILE_COLUMNS = ", ".join(field.name for field in fields(FileRecord))
BATCH_COLUMNS = ", ".join(field.name for field in fields(BatchRecord))


def result_id(batch_id: str, number: int) -> str:
    """The id of a line's result: the same whenever the line is run."""
    return f"batch_req_{batch_id.removeprefix('batch_')}_{number}"


def answered(
    batch_id: str, number: int, custom_id: str | None, request_id: str, status: int, body: dict[str, Any]
) -> bytes:
    """The result of a line that got an answer over the API's own path."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    return orjson.dumps(
        {"id": result_id(batch_id, number), "custom_id": custom_id, "response": response, "error": None}
    )


def unanswered(batch_id: str, number: int, custom_id: str | None, code: str, message: str) -> bytes:
    """The result of a line that was never a request."""
    error = {"code": code, "message": message}
    return orjson.dumps({"id": result_id(batch_id, number), "custom_id": custom_id, "response": None, "error": error})
