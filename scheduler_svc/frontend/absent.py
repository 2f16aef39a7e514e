"""Routes that clients of vLLM know and this service has no models for: it says so, instead of knowing no such path."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from scheduler_svc.http.errors import ApiError

router = APIRouter()

PATHS = (
    "/v1/embeddings",
    "/pooling",
    "/classify",
    "/score",
    "/v1/score",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
)


async def refuse(request: Request) -> Response:
    """404, whatever is asked."""
    text = f"{request.url.path} is not supported: the models served here generate text; they embed, score and rank none"
    raise ApiError(404, text, code="unsupported_endpoint")


for path in PATHS:
    router.add_api_route(path, refuse, methods=["POST"], include_in_schema=False)
