"""A multipart upload, written to the database while it arrives: a megabyte of it is in memory at a time."""

from __future__ import annotations

import logging
import re
import time
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from scheduler_svc.batches.files import CHUNK_BYTES
from scheduler_svc.batches.records import FileRecord, new_id
from scheduler_svc.frontend.batching.access import ask, tenant_of
from scheduler_svc.frontend.frontend import frontend_of
from scheduler_svc.http.body import announced_bytes, body_parts
from scheduler_svc.http.errors import ApiError, invalid

# It writes a line for each form that cannot be read; the client is told, and could fill the log.
logging.getLogger("python_multipart").setLevel(logging.CRITICAL)

WRITE_BYTES = 4 * CHUNK_BYTES
MAX_FORM_BYTES = 64 << 10
"""Of all that is not the file: headers, boundaries, other fields."""
MAX_FILENAME = 512
MIN_EXPIRY_S, MAX_EXPIRY_S = 3600, 2_592_000
"""OpenAI's bounds of `expires_after[seconds]`."""
PROLONG_S = 60.0
"""While an upload comes, it is noted this often that it does."""
ANCHOR = "created_at"
PURPOSE = "batch"
_COUNT = re.compile(r"[0-9]{1,9}")


@dataclass(slots=True)
class _Part:
    headers: dict[bytes, bytes] = field(default_factory=dict)
    name: str = ""
    filename: str | None = None
    value: bytearray = field(default_factory=bytearray)


class UploadForm:
    """Parses the form; raises `ApiError` for a boundary that cannot be one.

    What has come of the file is taken with `take_content`; the other fields are in `fields`.
    """

    def __init__(self, boundary: bytes, max_file_bytes: int) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        """None before the file's part has begun."""
        self.size = 0
        """Bytes of the file so far."""
        self.complete = False
        self._max_file_bytes = max_file_bytes
        self._content = bytearray()
        self._other_bytes = 0
        self._part = _Part()
        self._header = (bytearray(), bytearray())
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin_part,
                    "on_header_field": lambda data, start, end: self._header[0].extend(data[start:end]),
                    "on_header_value": lambda data, start, end: self._header[1].extend(data[start:end]),
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._end_headers,
                    "on_part_data": self._take_data,
                    "on_part_end": self._end_part,
                    "on_end": self._end,
                },
            )
        except FormParserError as error:  # a boundary that is too long
            raise _no_form(error) from None

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the body. Raises `ApiError`."""
        before = self.size
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _no_form(error) from None
        self._other_bytes += len(data) - (self.size - before)
        if self.size > self._max_file_bytes:
            raise file_too_large(self._max_file_bytes)
        if self._other_bytes > MAX_FORM_BYTES:
            raise ApiError(
                413, f"the form has more than {MAX_FORM_BYTES} bytes beside the file", code="request_too_large"
            )

    @property
    def num_unwritten(self) -> int:
        """Bytes of the file that wait to be taken."""
        return len(self._content)

    def take_content(self, *, rest: bool = False) -> bytes:
        """Bytes of the file to write: a multiple of `WRITE_BYTES`, or all that there are."""
        count = len(self._content) if rest else len(self._content) // WRITE_BYTES * WRITE_BYTES
        taken = bytes(self._content[:count])
        del self._content[:count]
        return taken

    def _begin_part(self) -> None:
        self._part = _Part()

    def _end_header(self) -> None:
        name, value = self._header
        self._part.headers[bytes(name).lower()] = bytes(value)
        self._header = (bytearray(), bytearray())

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._part.headers.get(b"content-disposition", b""))
        self._part.name = options.get(b"name", b"").decode(errors="replace")
        filename = options.get(b"filename")
        if self._part.name == "file":
            if filename is None:
                raise invalid("file", "file: must be a file, not a text field")
            if self.filename is not None:
                raise invalid("file", "file: is there twice")
            self.filename = clean_filename(filename.decode(errors="replace"))

    def _take_data(self, data: bytes, start: int, end: int) -> None:
        if self._part.name == "file":
            self._content += data[start:end]
            self.size += end - start
        else:
            self._part.value += data[start:end]

    def _end_part(self) -> None:
        if self._part.name != "file":
            self.fields[self._part.name] = self._part.value.decode(errors="replace")

    def _end(self) -> None:
        self.complete = True


async def receive_file(request: Request, max_bytes: int) -> FileRecord:
    """Store an upload. Raises `ApiError`, or `ClientGone`; then nothing of it remains."""
    form = UploadForm(_boundary(request), max_bytes)
    size = announced_bytes(request)
    if size > max_bytes + MAX_FORM_BYTES:
        raise file_too_large(max_bytes)
    await _check_quota(request, max(0, size - MAX_FORM_BYTES))
    now = int(time.time())
    file = FileRecord(new_id("file-"), tenant_of(request), "", PURPOSE, 0, now, _given_up_at(request), is_complete=0)
    await ask(request, lambda store: store.files.begin(file, size))
    try:
        await _receive(request, form, file.id)
        file = replace(_checked(form, file), is_complete=1)
        await ask(request, lambda store: store.files.complete(file))
    except BaseException:
        await ask(request, lambda store: store.files.abandon(file.id))
        raise
    return file


def _given_up_at(request: Request) -> int:
    """When an upload, of which something has just come, is over even if nobody is left to say so."""
    return int(time.time() + frontend_of(request).settings.stalled_client_s + 3 * PROLONG_S)


async def _check_quota(request: Request, coming: int = 0) -> None:
    """Raise `ApiError` 413 when a tenant's uploads are more than it may store, with so many bytes that are to come.

    What has come is committed before: so of two uploads at a time, at whatever frontends, the later one sees both.
    """
    quota = frontend_of(request).settings.batch_max_tenant_mb << 20
    if not quota:
        return
    tenant = tenant_of(request)
    if await ask(request, lambda store: store.files.stored_bytes(tenant)) + coming > quota:
        text = f"file: with it there would be more than the {quota} bytes of files that a tenant may store"
        raise ApiError(413, text, param="file", code="storage_quota_exceeded")


async def _receive(request: Request, form: UploadForm, file_id: str) -> None:
    number = 0

    async def write(data: bytes) -> None:
        nonlocal number
        if data:
            first = number
            number += -(-len(data) // CHUNK_BYTES)
            await ask(request, lambda store: store.files.append(file_id, first, data))
            await _check_quota(request)

    frontend, prolonged = frontend_of(request), time.monotonic()
    parts = body_parts(request, frontend.settings.stalled_client_s)
    with frontend.bodies.hold() as held:
        async with aclosing(parts):
            async for part in parts:
                held.grow(len(part))
                form.feed(part)
                content = form.take_content()
                if content:
                    await write(content)
                    held.release()
                    held.grow(form.num_unwritten)
                if time.monotonic() - prolonged > PROLONG_S:
                    prolonged = time.monotonic()
                    await ask(request, lambda store: store.files.prolong(file_id, _given_up_at(request)))
        if not form.complete:
            raise invalid(None, "the body ends before the form does", "invalid_form")
        await write(form.take_content(rest=True))


def _checked(form: UploadForm, file: FileRecord) -> FileRecord:
    """The record of a whole upload. Raises `ApiError` 400."""
    purpose = form.fields.get("purpose")
    if purpose is None:
        raise invalid("purpose", "purpose: is required")
    if purpose != PURPOSE:
        raise invalid("purpose", f"purpose: only {PURPOSE} is supported", "unsupported_parameter")
    if form.filename is None:
        raise invalid("file", "file: is required")
    if not form.size:
        raise invalid("file", "file: is empty", "empty_file")
    text = form.fields.get("expires_after[seconds]")
    wanted = int(text) if text is not None and _COUNT.fullmatch(text) else text
    seconds = read_expiry(form.fields.get("expires_after[anchor]"), wanted)
    expires_at = None if seconds is None else file.created_at + seconds
    return replace(file, filename=form.filename, bytes=form.size, expires_at=expires_at)


def read_expiry(anchor: object, seconds: object, name: str = "expires_after") -> int | None:
    """Seconds from creation after which a file is deleted. Raises `ApiError` 400."""
    if anchor is None and seconds is None:
        return None
    if anchor != ANCHOR:
        raise invalid(f"{name}[anchor]", f"{name}[anchor]: must be {ANCHOR}")
    if type(seconds) is not int or not MIN_EXPIRY_S <= seconds <= MAX_EXPIRY_S:
        raise invalid(f"{name}[seconds]", f"{name}[seconds]: must be in [{MIN_EXPIRY_S}, {MAX_EXPIRY_S}]")
    return seconds


def clean_filename(name: str) -> str:
    """The last part of a path, without control characters."""
    last = name.replace("\\", "/").rsplit("/", 1)[-1]
    return "".join(character for character in last if character.isprintable())[:MAX_FILENAME]


def _no_form(error: FormParserError) -> ApiError:
    return invalid(None, f"the body is not valid multipart/form-data: {error}", "invalid_form")


def file_too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"file: is larger than {max_bytes} bytes", param="file", code="file_too_large")


def _boundary(request: Request) -> bytes:
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise invalid(None, "the body must be multipart/form-data with a boundary", "invalid_form")
    return options[b"boundary"]
