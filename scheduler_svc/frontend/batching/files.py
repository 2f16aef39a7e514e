"""`/v1/files`: upload, look, read, delete."""

from __future__ import annotations

import re
from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from scheduler_svc.batches.files import FileInUse, Page
from scheduler_svc.batches.records import FileRecord
from scheduler_svc.frontend.batching.access import admit_change, ask, tenant_of
from scheduler_svc.frontend.batching.download import Download
from scheduler_svc.frontend.batching.upload import receive_file
from scheduler_svc.frontend.frontend import frontend_of
from scheduler_svc.http.errors import ApiError, invalid

router = APIRouter()

MAX_FILES = 10_000
ORDERS = ("asc", "desc")
ID_PATTERN = r"[A-Za-z0-9_-]{1,100}"
"""Ids of files and batches; nothing else is looked up."""
_ID = re.compile(ID_PATTERN)


@router.post("/v1/files")
async def upload_file(request: Request) -> Response:
    """Take a file for a batch."""
    admit_change(request)
    file = await receive_file(request, frontend_of(request).settings.batch_max_file_mb << 20)
    return answer(file.describe())


@router.get("/v1/files")
async def list_files(request: Request) -> Response:
    order = request.query_params.get("order", "desc")
    if order not in ORDERS:
        raise invalid("order", "order: must be asc or desc")
    part = read_page(request, MAX_FILES, MAX_FILES, ascending=order == "asc")
    purpose = request.query_params.get("purpose", "").replace("\0", "")
    found = await ask(request, lambda store: store.files.page(tenant_of(request), purpose, part))
    return answer(listing([file.describe() for file in found], part.limit))


@router.get("/v1/files/{file_id}")
async def tell_file(request: Request, file_id: str) -> Response:
    return answer((await find_file(request, file_id)).describe())


@router.delete("/v1/files/{file_id}")
async def delete_file(request: Request, file_id: str) -> Response:
    """Not while a batch reads it. The results that an output file shows go with it."""
    try:
        deleted = checked_id(file_id) and await ask(
            request, lambda store: store.files.delete(tenant_of(request), file_id)
        )
    except FileInUse as error:
        raise invalid("file_id", f"The file is the input of {error}, which has not ended.", "file_in_use") from None
    if not deleted:
        raise no_file(file_id)
    return answer({"id": file_id, "object": "file", "deleted": True})


@router.get("/v1/files/{file_id}/content")
async def read_file(request: Request, file_id: str) -> Response:
    return Download(await find_file(request, file_id))


# --- shared with the batches' routes ---


def checked_id(text: str) -> bool:
    """Whether it may be the id of a file or batch."""
    return _ID.fullmatch(text) is not None


async def find_file(request: Request, file_id: str) -> FileRecord:
    """Raises `ApiError` 404."""
    found = None
    if checked_id(file_id):
        found = await ask(request, lambda store: store.files.find(tenant_of(request), file_id))
    if found is None:
        raise no_file(file_id)
    return found


def no_file(file_id: str) -> ApiError:
    return ApiError(404, f"No such File object: {file_id[:100]}", param="id", code="file_not_found")


def read_page(request: Request, default: int, most: int, *, ascending: bool = False) -> Page:
    """`after` and `limit` of a query. Raises `ApiError` 400."""
    after, limit = request.query_params.get("after", ""), request.query_params.get("limit", str(default))
    if after and not checked_id(after):
        raise invalid("after", "after: is no id")
    if not (limit.isdecimal() and limit.isascii() and len(limit) < 10 and 1 <= int(limit) <= most):
        raise invalid("limit", f"limit: must be in [1, {most}]")
    return Page(after, int(limit), ascending)


def listing(data: list[dict[str, Any]], limit: int) -> dict[str, Any]:
    """OpenAI's page of a list, of which there may be one more than the limit."""
    shown = data[:limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(data) > limit,
    }


def answer(value: dict[str, Any]) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")
