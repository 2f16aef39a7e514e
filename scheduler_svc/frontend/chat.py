"""`POST /v1/chat/completions`."""

from __future__ import annotations

from dataclasses import replace

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from scheduler_svc.frontend.call import Task
from scheduler_svc.frontend.constraints.bounding import behind_reasoning, bound
from scheduler_svc.frontend.constraints.tool_calls import calls_grammar
from scheduler_svc.frontend.frontend import Frontend
from scheduler_svc.frontend.logprobs import LogprobWriter
from scheduler_svc.frontend.parameters import MAX_LOGPROBS, MODEL, log_unknown, read_parameters
from scheduler_svc.frontend.prompts import read_chat_prompt
from scheduler_svc.frontend.reading import check_tools, read_reading
from scheduler_svc.frontend.serving import check_streams, serve
from scheduler_svc.frontend.shapes import ChatShape
from scheduler_svc.frontend.streams import Generation
from scheduler_svc.frontend.token_fields import read_token_fields
from scheduler_svc.frontend.tools import read_tooling
from scheduler_svc.frontend.unsupported import CHAT, refuse_unsupported
from scheduler_svc.http.errors import invalid
from scheduler_svc.http.field_kinds import Boolean, Integer
from scheduler_svc.http.fields import Fields

router = APIRouter()

LOGPROBS = Boolean("logprobs", False)
TOP_LOGPROBS = Integer("top_logprobs", None, 0, MAX_LOGPROBS)
MAX_TOKENS_NAMES = ("max_completion_tokens", "max_tokens")


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    return await serve(request, prepare)


async def prepare(frontend: Frontend, fields: Fields, generation: Generation, request_id: str) -> Task:
    """Check a request, render its messages and tokenize them."""
    refuse_unsupported(fields, CHAT)
    model = frontend.models.find(MODEL.read(fields), generation.key)
    parameters = read_parameters(fields, model, max_tokens_names=MAX_TOKENS_NAMES)
    check_streams(parameters, 1, frontend.settings.max_streams_per_request)
    tooling = read_tooling(fields)
    call_format = check_tools(tooling, model, frontend.settings)
    parameters = await bound(parameters, fields, model, frontend, generation, calls_grammar(tooling))
    wanted = LOGPROBS.read(fields)
    top = TOP_LOGPROBS.read(fields)
    if top is not None and top > 0 and not wanted:
        raise invalid("top_logprobs", "top_logprobs: is only allowed with logprobs=true")
    if wanted:
        parameters = replace(parameters, sampling=replace(parameters.sampling, logprobs=top or 0))
    add_special_tokens = bool(parameters.add_special_tokens)
    tokens = read_token_fields(fields, parameters, model, 1)
    if tokens.prompt_logprobs is not None:
        parameters = replace(parameters, sampling=replace(parameters.sampling, prompt_logprobs=tokens.prompt_logprobs))
    prompt = await read_chat_prompt(
        fields, model, add_special_tokens, frontend.pool, generation, tooling, keep=tokens.keep
    )
    bounded, parser = bool(parameters.sampling.constraint.language), frontend.settings.reasoning_parser
    reading = read_reading(fields, tooling, call_format, model, prompt.text or "", parser, bounded=bounded)
    parameters = behind_reasoning(parameters, reading)
    log_unknown(fields)
    writer = LogprobWriter(model.tokenizer, top or 0, parameters.skip_special_tokens, tokens.as_ids)
    return Task(
        model=model,
        parameters=parameters,
        prompts=[prompt],
        samplings=[parameters.sampling_for(model, len(prompt.ids), None, "messages")],
        shape=ChatShape(writer),
        request_id=request_id,
        logprobs=wanted,
        tokens=tokens,
        reading=reading,
    )
