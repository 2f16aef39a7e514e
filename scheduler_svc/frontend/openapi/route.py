"""`GET /openapi.json`: built when it is first asked for, and kept."""

from __future__ import annotations

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from scheduler_svc.frontend.frontend import frontend_of
from scheduler_svc.frontend.health import VERSION
from scheduler_svc.frontend.openapi.document import build

router = APIRouter()


@router.get("/openapi.json")
async def tell_openapi(request: Request) -> Response:
    """The API's description, OpenAPI 3.1."""
    state = request.app.state
    if not hasattr(state, "openapi"):
        frontend = frontend_of(request)
        state.openapi = orjson.dumps(build(frontend.settings, VERSION, with_keys=frontend.keys.asked_for))
    return Response(state.openapi, media_type="application/json")
