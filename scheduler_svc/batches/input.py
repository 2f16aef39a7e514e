"""The lines of an input file: each is a request, or says what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from scheduler_svc.batches.records import unanswered
from scheduler_svc.batches.store import CheckedLine
from scheduler_svc.http.body import parse_fields
from scheduler_svc.http.errors import ApiError, invalid
from scheduler_svc.http.fields import Fields, show

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
MAX_LINES = 50_000
"""OpenAI's limit."""
MAX_CUSTOM_ID = 512
MAX_ERRORS = 100
"""Errors of an unusable file that are told."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(slots=True)
class InputFile:
    """Checks the lines of one batch's input, and sums up."""

    batch_id: str
    endpoint: str
    max_line_bytes: int
    total: int = 0
    failed: int = 0
    errors: list[dict[str, Any]] = field(default_factory=list)
    _models: set[str | None] = field(default_factory=set)
    _custom_ids: set[str] = field(default_factory=set)

    def check(self, lines: Iterable[tuple[int, bytes]]) -> Iterator[CheckedLine]:
        """From (place in the file, line) to lines, numbered from 1 as in the file; blank ones are passed over.

        Ends after one line more than there may be.
        """
        for number, (place, data) in enumerate(lines, 1):
            if number == 1:
                data_start = len(_BYTE_ORDER_MARK) if data.startswith(_BYTE_ORDER_MARK) else 0
                place, data = place + data_start, data[data_start:]
            if not data.strip():
                continue
            self.total += 1
            if self.total > MAX_LINES:
                return
            yield self._check(number, place, data)

    def _check(self, number: int, place: int, data: bytes) -> CheckedLine:
        custom_id: str | None = None
        try:
            if len(data) > self.max_line_bytes:
                raise ApiError(413, f"the line is longer than {self.max_line_bytes} bytes", code="request_too_large")
            fields = parse_fields(data)
            # PostgreSQL's texts have no room for a NUL.
            custom_id = (fields.text("custom_id", None, MAX_CUSTOM_ID) or "").replace("\0", "") or None
            body = read_line(fields, self.endpoint)
            if custom_id in self._custom_ids:
                raise invalid("custom_id", f"custom_id: {show(custom_id)} is there twice", "duplicate_custom_id")
        except ApiError as error:
            self.failed += 1
            code = error.code or "invalid_request"
            if len(self.errors) < MAX_ERRORS:
                self.errors.append({"code": code, "line": number, "message": error.message, "param": error.param})
            bad = unanswered(self.batch_id, number, custom_id, code, error.message)
            return CheckedLine(number, custom_id, place, len(data), bad)
        assert custom_id is not None
        self._custom_ids.add(custom_id)
        model = body.raw("model")
        self._models.add(model if type(model) is str and len(model) <= MAX_CUSTOM_ID and "\0" not in model else None)
        return CheckedLine(number, custom_id, place, len(data))

    @property
    def model(self) -> str | None:
        """The model that all requests name."""
        return next(iter(self._models)) if len(self._models) == 1 else None

    def failure(self) -> list[dict[str, Any]]:
        """Why the file cannot be used at all: empty when it can."""
        if self.total > MAX_LINES:
            text = f"The file has more than {MAX_LINES} requests."
            return [{"code": "too_many_requests", "line": None, "message": text, "param": None}]
        if not self.total:
            text = "The file has no requests."
            return [{"code": "empty_file", "line": None, "message": text, "param": None}]
        return self.errors if self.failed == self.total else []


def read_line(fields: Fields, endpoint: str) -> Fields:
    """The body of a line's request. Raises `ApiError` when the line is no request to the batch's endpoint."""
    custom_id = fields.text("custom_id", None, MAX_CUSTOM_ID)
    if not custom_id:
        raise invalid("custom_id", "custom_id: is required", "missing_custom_id")
    if "\0" in custom_id:
        raise invalid("custom_id", "custom_id: must not hold a NUL")
    method, url = fields.raw("method"), fields.raw("url")
    if method != "POST":
        raise invalid("method", f"method: must be POST, got {show(method)}", "invalid_method")
    if url != endpoint:
        raise invalid("url", f"url: must be the batch's endpoint {endpoint}, got {show(url)}", "mismatched_endpoint")
    values = fields.object("body", None)
    if values is None:
        raise invalid("body", "body: is required", "missing_body")
    body = Fields(values, size=fields.size)
    if body.boolean("stream", False):
        raise invalid("stream", "stream: has no meaning in a batch", "unsupported_parameter")
    return body
