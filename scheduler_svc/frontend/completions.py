"""`POST /v1/completions`."""

from __future__ import annotations

from dataclasses import replace

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from scheduler_svc.frontend.call import Task
from scheduler_svc.frontend.constraints.bounding import bound
from scheduler_svc.frontend.frontend import Frontend
from scheduler_svc.frontend.logprobs import LogprobWriter
from scheduler_svc.frontend.parameters import MAX_LOGPROBS, MODEL, log_unknown, read_parameters
from scheduler_svc.frontend.prompts import read_completion_prompts
from scheduler_svc.frontend.serving import check_streams, serve
from scheduler_svc.frontend.shapes import CompletionShape
from scheduler_svc.frontend.streams import Generation
from scheduler_svc.frontend.token_fields import read_token_fields
from scheduler_svc.frontend.unsupported import COMPLETIONS, refuse_best_of, refuse_unsupported
from scheduler_svc.http.field_kinds import Boolean, Integer
from scheduler_svc.http.fields import Fields

router = APIRouter()

DEFAULT_MAX_TOKENS = 16
LOGPROBS = Integer("logprobs", None, 0, MAX_LOGPROBS)
ECHO = Boolean("echo", False)
MAX_TOKENS_NAMES = ("max_tokens",)


@router.post("/v1/completions")
async def create_completion(request: Request) -> Response:
    """Continue prompts, given as text or as token ids."""
    return await serve(request, prepare)


async def prepare(frontend: Frontend, fields: Fields, generation: Generation, request_id: str) -> Task:
    """Check a request and tokenize its prompts."""
    refuse_unsupported(fields, COMPLETIONS)
    model = frontend.models.find(MODEL.read(fields), generation.key)
    parameters = read_parameters(fields, model, max_tokens_names=MAX_TOKENS_NAMES)
    parameters = await bound(parameters, fields, model, frontend, generation)
    refuse_best_of(fields, parameters.n)
    top = LOGPROBS.read(fields)
    echo = ECHO.read(fields)
    raw = fields.raw("prompt")
    if type(raw) is list and raw and type(raw[0]) in (str, list):
        check_streams(parameters, len(raw), frontend.settings.max_streams_per_request)
    else:
        check_streams(parameters, 1, frontend.settings.max_streams_per_request)
    tokens = read_token_fields(fields, parameters, model, DEFAULT_MAX_TOKENS)
    log_unknown(fields)
    scored = max(
        top if echo and top is not None else -1, -1 if tokens.prompt_logprobs is None else tokens.prompt_logprobs
    )
    sampling = replace(parameters.sampling, logprobs=-1 if top is None else top, prompt_logprobs=scored)
    parameters = replace(parameters, sampling=sampling)
    add_special_tokens = True if parameters.add_special_tokens is None else parameters.add_special_tokens
    prompts = await read_completion_prompts(fields, model, add_special_tokens, frontend.pool, generation, tokens.keep)
    writer = LogprobWriter(model.tokenizer, top or 0, parameters.skip_special_tokens, tokens.as_ids)
    return Task(
        model=model,
        parameters=parameters,
        prompts=prompts,
        samplings=[parameters.sampling_for(model, len(p.ids), DEFAULT_MAX_TOKENS, "prompt") for p in prompts],
        shape=CompletionShape(writer),
        request_id=request_id,
        logprobs=top is not None,
        echo=echo,
        tokens=tokens,
    )
