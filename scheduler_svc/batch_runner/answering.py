"""One line of a batch, on the very path of the API's own requests: the same checks, the same answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from scheduler_svc.batches.records import BatchRecord
from scheduler_svc.frontend import chat, completions
from scheduler_svc.frontend.call import Call
from scheduler_svc.frontend.frontend import Frontend
from scheduler_svc.frontend.responses import routes as responses
from scheduler_svc.frontend.scheduling import BATCH_PRIORITY, MAX_TIMEOUT_S, TimeLimit
from scheduler_svc.frontend.serving import Prepare
from scheduler_svc.http.errors import ApiError
from scheduler_svc.http.fields import Fields

PREPARE: dict[str, Prepare] = {
    "/v1/chat/completions": chat.prepare,
    "/v1/completions": completions.prepare,
    "/v1/responses": responses.prepare,
}


class LineAnswer(NamedTuple):
    """`body`: as the endpoint tells it. `usage`: as those of completions do, whatever the endpoint."""

    body: dict[str, Any]
    usage: dict[str, Any]


async def answer_request(
    frontend: Frontend, record: BatchRecord, body: Fields, request_id: str, left_s: float
) -> LineAnswer:
    """Run a line. Raises `ApiError`. Cancelled, it aborts its sequences in the core.

    `left_s`: seconds until its batch expires, its time limit in the place of the service's own: it may wait long.
    """
    limit = TimeLimit(min(left_s, MAX_TIMEOUT_S))
    frontend.admit()
    key = frontend.keys.named(record.key_id)
    if key is None or key.tenant not in ("", record.tenant):  # revoked, or its id was given to another tenant's
        raise ApiError(401, "The API key that made the batch is not valid any more.", code="invalid_api_key")
    generation = frontend.link.generation(key)
    try:
        task = await PREPARE[record.endpoint](frontend, body, generation, request_id)
        generation.check()
        # Whatever class the line asks for: it fills seats that nobody else wants.
        scheduling = replace(task.parameters.scheduling, priority=BATCH_PRIORITY)
        task = replace(task, parameters=replace(task.parameters, scheduling=scheduling))
        call = Call(task, generation, frontend.link, limit, record.tenant or None)
        answer = await call.collect()
        return LineAnswer(answer if task.form is None else task.form.whole(call, answer), call.usage())
    finally:
        generation.close()
