"""The way of one generating request: body, task, call, answer."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

import orjson
from starlette.requests import Request
from starlette.responses import Response

from scheduler_svc.frontend.auth import key_of
from scheduler_svc.frontend.call import Call, Task
from scheduler_svc.frontend.client import ClientWatch
from scheduler_svc.frontend.event_stream import EventStream
from scheduler_svc.frontend.frontend import Frontend, frontend_of
from scheduler_svc.frontend.parameters import REQUEST_ID as REQUEST_ID_FIELD
from scheduler_svc.frontend.parameters import Parameters
from scheduler_svc.frontend.resuming.answer import answer_reading
from scheduler_svc.frontend.resuming.kept_stream import StreamReading
from scheduler_svc.frontend.scheduling import TimeLimit, header_time_limit, tenant_of
from scheduler_svc.frontend.sse import ChunkWriter
from scheduler_svc.frontend.streams import Generation
from scheduler_svc.http.body import parse_fields, read_body
from scheduler_svc.http.body_budget import HeldBody
from scheduler_svc.http.errors import ApiError, invalid
from scheduler_svc.http.fields import Fields

REQUEST_ID = re.compile(REQUEST_ID_FIELD.pattern or "")
"""What a request id may look like, as a header and in a body."""

RESUMABLE_HEADER = "X-Gilir-Resumable"

Prepare = Callable[[Frontend, Fields, Generation, str], Awaitable[Task]]


async def serve(request: Request, prepare: Prepare) -> Response:
    """Answer one request. `prepare` makes a task of its fields.

    A streamed answer begins only when its first result is there, so an early error still has its own HTTP status.
    """
    frontend = frontend_of(request)
    frontend.admit()
    limit = header_time_limit(request)
    with frontend.bodies.hold() as held:
        settings = frontend.settings
        # What is still to come of a body is not read.
        async with limit.bound({"connection": "close"}):
            body = await read_body(request, held, settings.max_body_bytes, settings.stalled_client_s)
        fields = parse_fields(body)
        del body
        return await _serve(request, prepare, fields, held, limit)


async def _serve(request: Request, prepare: Prepare, fields: Fields, held: HeldBody, limit: TimeLimit) -> Response:
    """As `serve`, from the fields on; they are dropped, and what is held for them, when there is a task."""
    frontend, key = frontend_of(request), key_of(request)
    tenant, resumable = tenant_of(request, key), frontend.keeper.is_on and wants_resuming(request)
    generation = frontend.link.generation(key)
    generation.tenant = tenant or ""
    call: Call | None = None
    reading: StreamReading | None = None
    streaming = False

    def leave() -> None:
        generation.leave() if reading is None else reading.leave()

    def end() -> None:
        if call is not None:
            request.scope["gilir.log"] = call.summary()
        if reading is None:
            generation.close()
        watch.close()

    watch = ClientWatch(request.receive, leave)

    try:
        async with limit.bound():
            task = await prepare(frontend, fields, generation, _request_id(request, fields))
        del fields
        held.release()
        generation.check()
        frontend.admit()
        call = Call(task, generation, frontend.link, limit, tenant)
        if "gilir.trace" in request.scope:
            request.scope["gilir.trace"].follow(call)
        if not task.parameters.stream:
            answer = await call.collect()
            told = answer if task.form is None else task.form.whole(call, answer)
            return Response(orjson.dumps(told), media_type="application/json")
        with_usage = task.parameters.stream_options.usage
        if task.form is None:
            writer = ChunkWriter(call.id, call.created, task.model.name, task.shape, with_usage, call.told_once)
        else:
            writer = task.form.writer(call)
        if resumable:
            streaming = True
            reading = frontend.keeper.keep((tenant or "", task.request_id), call, writer)
            return await answer_reading(reading, end)
        response = EventStream(call, writer, await call.chunks(writer), end)
        streaming = True
        return response
    finally:
        if not streaming:
            end()


def wants_resuming(request: Request) -> bool:
    """Whether a streamed answer shall outlive its connection. Raises `ApiError` 400."""
    named = request.headers.get(RESUMABLE_HEADER, "false").lower()
    if named not in ("true", "false"):
        raise invalid(RESUMABLE_HEADER, f"{RESUMABLE_HEADER}: must be true or false")
    return named == "true"


def _request_id(request: Request, fields: Fields) -> str:
    """The body's `request_id`, else the header's, else the one that the request was given on arrival."""
    wanted = REQUEST_ID_FIELD.read(fields)
    if wanted is not None:
        if not REQUEST_ID.fullmatch(wanted):
            raise invalid("request_id", "request_id: must be 1 to 200 printable ASCII characters without spaces")
        request.scope["gilir.request_id"] = wanted
    return request.scope["gilir.request_id"]  # type: ignore[no-any-return]


def check_streams(parameters: Parameters, num_prompts: int, limit: int) -> None:
    """Raise `ApiError` 400 if the request asks for more sequences than one may."""
    if parameters.n * num_prompts > limit:
        text = f"n: {num_prompts} prompts times n={parameters.n} make more than {limit} sequences"
        raise ApiError(400, text, param="n")
