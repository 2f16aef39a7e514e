"""`GET /v1/requests/{id}`: where a live request stands, and why it waits."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from common.wire import Account, SequenceAccount
from scheduler_svc.frontend.auth import key_of
from scheduler_svc.frontend.frontend import frontend_of
from scheduler_svc.frontend.responses.form import ResponseShape
from scheduler_svc.frontend.serving import REQUEST_ID
from scheduler_svc.frontend.shapes import ChatShape, CompletionShape
from scheduler_svc.http.errors import ApiError, unavailable

router = APIRouter()

ROUTE = "/v1/requests/{request_id:path}"
PREFIXES = (ChatShape.id_prefix, CompletionShape.id_prefix, ResponseShape.id_prefix)


@router.get(ROUTE)
async def tell_request(request: Request, request_id: str) -> Response:
    """The request's account; 404 once it has ended, 503 when the core does not answer within two seconds.

    Who has a key is told of the requests of its tenant alone.
    """
    frontend = frontend_of(request)
    if not frontend.live:
        raise unavailable("the scheduler does not answer", "no_scheduler")
    for name in names_of(request_id):
        account = await frontend.link.inquiries.ask(name, key_of(request).tenant)
        if account.sequences:
            return Response(orjson.dumps(describe(request_id, account)), media_type="application/json")
    raise not_found(request_id, "is waiting or running", "request_not_found")


def not_found(request_id: str, missing: str, code: str) -> ApiError:
    """404: no request of this id is what is `missing`."""
    shown = request_id if len(request_id) <= 100 else request_id[:100] + "…"
    return ApiError(404, f"No request {shown!r} {missing}.", code=code)


def names_of(request_id: str) -> list[str]:
    """What the core may know a request as: an answer's `id` has a prefix, a header `X-Request-Id` none."""
    names = [request_id.removeprefix(prefix) for prefix in PREFIXES if request_id.startswith(prefix)]
    return [name for name in (*names, request_id) if REQUEST_ID.fullmatch(name)]


def describe(request_id: str, account: Account) -> dict[str, Any]:
    """The account as JSON."""
    running = any(sequence.state == "running" for sequence in account.sequences)
    return {
        "id": request_id,
        "object": "request",
        "model": account.model,
        "state": "running" if running else "waiting",
        "num_waiting": account.num_waiting,
        "sequences": [_describe_sequence(sequence) for sequence in account.sequences],
    }


def _describe_sequence(sequence: SequenceAccount) -> dict[str, Any]:
    return {
        "index": sequence.index,
        "state": sequence.state,
        "reason": sequence.reason,
        "executor": sequence.executor or None,
        "age_s": round(sequence.age_s, 6),
        "waited_s": {reason: round(seconds, 6) for reason, seconds in sequence.waited_s.items()},
        "priority": sequence.priority,
        "prompt_tokens": sequence.prompt_tokens,
        "computed_tokens": sequence.computed_tokens,
        "generated_tokens": sequence.generated_tokens,
        "cached_tokens": sequence.cached_tokens,
        "num_preemptions": sequence.num_preemptions,
    }
