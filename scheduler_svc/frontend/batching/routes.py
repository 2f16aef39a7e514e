"""`/v1/batches`: create, look, cancel. The work is the runner's."""

from __future__ import annotations

import re
import time

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from scheduler_svc.batches.input import ENDPOINTS
from scheduler_svc.batches.records import BatchRecord, Status, new_id
from scheduler_svc.batches.store import CannotCancel, Store
from scheduler_svc.frontend.auth import key_of
from scheduler_svc.frontend.batching.access import admit_change, ask, tenant_of
from scheduler_svc.frontend.batching.files import answer, checked_id, find_file, listing, read_page
from scheduler_svc.frontend.batching.upload import PURPOSE, read_expiry
from scheduler_svc.frontend.frontend import frontend_of
from scheduler_svc.http.body import parse_fields, read_body
from scheduler_svc.http.errors import ApiError, invalid
from scheduler_svc.http.field_kinds import Text
from scheduler_svc.http.fields import Fields, show

router = APIRouter()

DEFAULT_PAGE, MAX_PAGE = 20, 100
MAX_WINDOW_S = 30 * 86_400
MAX_METADATA, MAX_KEY, MAX_VALUE = 16, 64, 512
ENDPOINT = Text("endpoint", None, 100)
INPUT_FILE_ID = Text("input_file_id", None, 100)
WINDOW = Text("completion_window", None, 32, pattern=r"([1-9][0-9]{0,6})([mhd])")
_WINDOW = re.compile(WINDOW.pattern or "")
_UNIT_S = {"m": 60, "h": 3600, "d": 86_400}


@router.post("/v1/batches")
async def create_batch(request: Request) -> Response:
    """Begin a batch; its input is checked later, by the runner."""
    admit_change(request)
    frontend = frontend_of(request)
    with frontend.bodies.hold() as held:
        fields = parse_fields(
            await read_body(request, held, frontend.settings.max_body_bytes, frontend.settings.stalled_client_s)
        )
    endpoint = ENDPOINT.read(fields)
    if endpoint not in ENDPOINTS:
        raise invalid("endpoint", f"endpoint: must be one of {', '.join(ENDPOINTS)}, got {show(endpoint)}")
    window, window_s = _read_window(fields)
    metadata = _read_metadata(fields)
    expiry = Fields(fields.object("output_expires_after", {}), "output_expires_after")
    expires_s = read_expiry(expiry.raw("anchor"), expiry.raw("seconds"), "output_expires_after")
    file_id = INPUT_FILE_ID.read(fields)
    if file_id is None:
        raise invalid("input_file_id", "input_file_id: is required")
    file = await find_file(request, file_id)
    if file.purpose != PURPOSE:
        raise invalid("input_file_id", f"input_file_id: the file's purpose must be {PURPOSE}")
    now = int(time.time())
    batch = BatchRecord(
        id=new_id("batch_"),
        tenant=tenant_of(request),
        status=Status.VALIDATING.value,
        endpoint=endpoint,
        input_file_id=file_id,
        completion_window=window,
        metadata=metadata,
        model=None,
        errors=None,
        output_expires_s=expires_s,
        output_file_id=None,
        error_file_id=None,
        created_at=now,
        expires_at=now + window_s,
        key_id=key_of(request).id,
    )
    await ask(request, Store.create, batch)
    return answer(batch.describe())


@router.get("/v1/batches")
async def list_batches(request: Request) -> Response:
    part = read_page(request, DEFAULT_PAGE, MAX_PAGE)
    found = await ask(request, Store.page, tenant_of(request), part)
    return answer(listing([batch.describe() for batch in found], part.limit))


@router.get("/v1/batches/{batch_id}")
async def tell_batch(request: Request, batch_id: str) -> Response:
    found = await ask(request, Store.find, tenant_of(request), batch_id) if checked_id(batch_id) else None
    if found is None:
        raise _no_batch(batch_id)
    return answer(found.describe())


@router.post("/v1/batches/{batch_id}/cancel")
async def cancel_batch(request: Request, batch_id: str) -> Response:
    """It is `cancelling` until the runner has stopped its lines, some tenths of a second later."""
    try:
        found = await ask(request, Store.cancel, tenant_of(request), batch_id) if checked_id(batch_id) else None
    except CannotCancel as error:
        # Not 409: OpenAI's own client would try that again.
        raise invalid(None, f"Cannot cancel a batch with status '{error}'.", "batch_ended") from None
    if found is None:
        raise _no_batch(batch_id)
    return answer(found.describe())


def _no_batch(batch_id: str) -> ApiError:
    return ApiError(404, f"No batch found with id '{batch_id[:100]}'.", param="id", code="batch_not_found")


def _read_window(fields: Fields) -> tuple[str, int]:
    """`completion_window` and its seconds."""
    text = WINDOW.read(fields)
    if text is None:
        raise invalid("completion_window", "completion_window: is required, as in 24h")
    found = _WINDOW.fullmatch(text)
    seconds = int(found[1]) * _UNIT_S[found[2]] if found else 0
    if not 0 < seconds <= MAX_WINDOW_S:
        rule = "completion_window: must be a number of m, h or d up to 30d, as in 24h"
        raise invalid("completion_window", f"{rule}, got {show(text)}")
    return text, seconds


def _read_metadata(fields: Fields) -> str | None:
    values = fields.object("metadata", None)
    if values is None:
        return None
    if len(values) > MAX_METADATA:
        raise invalid("metadata", f"metadata: more than {MAX_METADATA} pairs")
    for key, value in values.items():
        if len(key) > MAX_KEY or type(value) is not str or len(value) > MAX_VALUE:
            rule = f"keys have up to {MAX_KEY} characters, values are strings of up to {MAX_VALUE}"
            raise invalid("metadata", f"metadata: {rule}")
    return orjson.dumps(values).decode()
