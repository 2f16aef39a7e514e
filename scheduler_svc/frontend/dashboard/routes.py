"""`GET /dashboard`, its files, and `/dashboard/events`: the live page.

The files are open to whoever may reach the service; all that they show comes from `/dashboard/events` and
`/dashboard/request`, which ask for a key where the service has keys.
"""

from __future__ import annotations

from pathlib import Path

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from scheduler_svc.frontend.accounts import describe
from scheduler_svc.frontend.auth import key_of
from scheduler_svc.frontend.dashboard.viewer import Viewer
from scheduler_svc.frontend.frontend import frontend_of
from scheduler_svc.frontend.serving import REQUEST_ID
from scheduler_svc.http.errors import ApiError, unavailable

router = APIRouter()

EVENTS = "/dashboard/events"
REQUEST = "/dashboard/request"
QUIET_ROUTES = (REQUEST, "/dashboard", "/dashboard/{name}")
"""Asked often by the page, or many at its start."""
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_FOLDER = Path(__file__).parent / "page"
FILES = {
    "/dashboard" if path.name == "index.html" else f"/dashboard/{path.name}": path
    for path in sorted(_FOLDER.iterdir())
    if path.suffix in _TYPES
}
"""By path in the URL."""
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


@router.get(EVENTS, include_in_schema=False)
async def watch(request: Request) -> Response:
    """Iterations, lanes and the queue as server-sent events, until the client goes or the service stops.

    Who has a key is told the request ids of its tenant alone. Raises `ApiError` 503 when the core does not answer, or
    too many watch.
    """
    frontend = frontend_of(request)
    if frontend.stopping:
        raise unavailable("the service is stopping", "shutting_down")
    if not frontend.live:
        raise unavailable("the scheduler does not answer", "no_scheduler")
    link = frontend.link
    return Viewer(frontend.feed, key_of(request).tenant, lambda: link.stats, lambda: frontend.stopping)


@router.get(REQUEST, include_in_schema=False)
async def tell_request(request: Request, id: str = "") -> Response:
    """As `/v1/requests/{id}`, but one that has ended is told of without sequences: the page may ask a little late."""
    if not REQUEST_ID.fullmatch(id):
        raise ApiError(400, "id: must be a request id", param="id")
    account = await frontend_of(request).link.inquiries.ask(id, key_of(request).tenant)
    return Response(orjson.dumps(describe(id, account)), media_type="application/json")


@router.get("/dashboard", include_in_schema=False)
@router.get("/dashboard/{name}", include_in_schema=False)
async def page(request: Request) -> Response:
    """A file of the page; 404 for any other name."""
    path = FILES.get(request.url.path)
    if path is None:
        raise ApiError(404, "there is nothing at this path", code="not_found")
    return Response(path.read_bytes(), media_type=_TYPES[path.suffix], headers=HEADERS)
