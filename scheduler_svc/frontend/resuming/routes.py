"""`GET /v1/requests/{id}/stream`: a streamed answer is taken up again. Which streams are kept, a header says."""

from __future__ import annotations

import re

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from scheduler_svc.frontend.accounts import names_of, not_found
from scheduler_svc.frontend.auth import key_of
from scheduler_svc.frontend.client import ClientWatch
from scheduler_svc.frontend.frontend import frontend_of
from scheduler_svc.frontend.resuming.answer import answer_reading
from scheduler_svc.frontend.resuming.kept_stream import LAST_EVENT_ID
from scheduler_svc.frontend.scheduling import tenant_of
from scheduler_svc.http.errors import invalid

router = APIRouter()

ROUTE = "/v1/requests/{request_id:path}/stream"
QUERY = "last_event_id"
MAX_EVENT_ID = 1 << 53
_NUMBER = re.compile("[0-9]{1,16}")


@router.get(ROUTE)
async def resume_stream(request: Request, request_id: str) -> Response:
    """The events after `Last-Event-ID`, or all, and then those to come, of a stream that is kept here or at a peer.

    404 where none does, or not for this tenant; 410 where the events wanted are kept no more.
    """
    after = last_event_id(request)
    owner = tenant_of(request, key_of(request)) or ""
    found = await frontend_of(request).peers.find(owner, names_of(request_id))
    if found is None:
        raise not_found(request_id, "is kept as a stream", "stream_not_found")
    reading = await found(after)
    watch = ClientWatch(request.receive, reading.leave)
    return await answer_reading(reading, watch.close)


def last_event_id(request: Request) -> int:
    """The last event that the client has: what the header says, else the query; 0 for none. Raises `ApiError` 400."""
    named = request.headers.get(LAST_EVENT_ID) or request.query_params.get(QUERY) or "0"
    if not _NUMBER.fullmatch(named) or int(named) > MAX_EVENT_ID:
        raise invalid(LAST_EVENT_ID, f"{LAST_EVENT_ID}: must be the id of an event, a whole number")
    return int(named)
