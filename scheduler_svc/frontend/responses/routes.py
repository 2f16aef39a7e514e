"""`POST /v1/responses`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from scheduler_svc.frontend import chat
from scheduler_svc.frontend.call import Task
from scheduler_svc.frontend.frontend import Frontend
from scheduler_svc.frontend.logprobs import LogprobWriter
from scheduler_svc.frontend.parameters import log_unknown
from scheduler_svc.frontend.parsing.reasoning import THINK_END
from scheduler_svc.frontend.prompts import INLINE_BYTES, run_in_pool
from scheduler_svc.frontend.responses.asked import in_our_words, read_asked
from scheduler_svc.frontend.responses.form import ResponseForm, ResponseShape
from scheduler_svc.frontend.serving import serve
from scheduler_svc.frontend.streams import Generation
from scheduler_svc.http.errors import ApiError
from scheduler_svc.http.fields import Fields

router = APIRouter()


@router.post("/v1/responses")
async def create_response(request: Request) -> Response:
    """Answer a conversation that the request holds whole: nothing of it is kept."""
    return await serve(request, prepare)


async def prepare(frontend: Frontend, fields: Fields, generation: Generation, request_id: str) -> Task:
    """The task of the chat that the request means."""
    reading = partial(read_asked, fields)
    inline = fields.size <= INLINE_BYTES
    asked = reading() if inline else await run_in_pool(frontend.pool, generation, reading, doubtful=False)
    log_unknown(fields)
    try:
        task = await chat.prepare(frontend, Fields(asked.chat, size=fields.size), generation, request_id)
    except ApiError as error:
        raise in_our_words(error) from error
    reasons = task.reading is not None and task.reading.splits_reasoning
    end_id = task.model.token_id(THINK_END) if reasons else None
    return replace(
        task,
        shape=ResponseShape(LogprobWriter(task.model.tokenizer, asked.top, task.parameters.skip_special_tokens)),
        tokens=replace(task.tokens, ids=end_id is not None),
        form=ResponseForm(asked.told, end_id),
    )
