"""`POST /tokenize`, `POST /detokenize` and `GET /tokenizer_info`, in vLLM's shapes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from scheduler_svc.frontend.auth import key_of
from scheduler_svc.frontend.client import ClientWatch
from scheduler_svc.frontend.frontend import Frontend, frontend_of
from scheduler_svc.frontend.models import ServedModel
from scheduler_svc.frontend.parameters import ADD_SPECIAL_TOKENS, MODEL, token_ids
from scheduler_svc.frontend.prompts import read_rendering, run_in_pool
from scheduler_svc.frontend.streams import Generation
from scheduler_svc.frontend.tools import read_tooling
from scheduler_svc.http.body import MAX_COMMAS, parse_fields, read_body
from scheduler_svc.http.errors import invalid
from scheduler_svc.http.field_kinds import Boolean, Text
from scheduler_svc.http.fields import Fields

router = APIRouter()

MAX_IDS = MAX_COMMAS
"""More do not come in one body."""
PROMPT = Text("prompt", None, 1 << 22)
RETURN_TOKEN_STRS = Boolean("return_token_strs", False)


@asynccontextmanager
async def _opened(request: Request) -> AsyncIterator[tuple[Frontend, Fields, ServedModel, Generation]]:
    """A request's fields and model, and a generation without streams, which ends when the client leaves."""
    frontend, key = frontend_of(request), key_of(request)
    with frontend.bodies.hold() as held:
        fields = parse_fields(
            await read_body(request, held, frontend.settings.max_body_bytes, frontend.settings.stalled_client_s)
        )
        generation = frontend.link.generation(key)
        watch = ClientWatch(request.receive, generation.leave)
        try:
            yield frontend, fields, frontend.models.find(MODEL.read(fields), key), generation
        finally:
            generation.close()
            watch.close()


@router.post("/tokenize")
async def tokenize(request: Request) -> Response:
    """Token ids of a `prompt`, or of `messages` through the chat template."""
    async with _opened(request) as (frontend, fields, model, generation):
        text = PROMPT.read(fields)
        if fields.raw("messages") is not None:
            doubtful = fields.size > model.usual_text
            rendering = read_rendering(fields, model, read_tooling(fields))
            text = await run_in_pool(frontend.pool, generation, rendering, doubtful=doubtful)
            add_special_tokens = ADD_SPECIAL_TOKENS.read_or(fields, False)
        elif text is not None:
            add_special_tokens = ADD_SPECIAL_TOKENS.read_or(fields, True)
        else:
            raise invalid("prompt", "prompt: is required, or messages instead")
        if len(text) > PROMPT.max_length:
            raise invalid("messages", f"messages: rendered, they have more than {PROMPT.max_length} characters")
        work = partial(_tokenized, model, text, add_special_tokens, RETURN_TOKEN_STRS.read(fields))
        return await run_in_pool(frontend.pool, generation, work, doubtful=len(text) > model.usual_text)


def _tokenized(model: ServedModel, text: str, add_special_tokens: bool, with_strings: bool) -> Response:
    """The whole answer, made off the event loop."""
    ids = model.tokenizer.encode(text, add_special_tokens)
    strings = [model.tokenizer.token_text(token) for token in ids] if with_strings else None
    return _json({"count": len(ids), "max_model_len": model.card.max_model_len, "tokens": ids, "token_strs": strings})


@router.post("/detokenize")
async def detokenize(request: Request) -> Response:
    """The text of `tokens`, special ones included."""
    async with _opened(request) as (frontend, fields, model, generation):
        tokens = fields.array("tokens", None, MAX_IDS)
        if tokens is None:
            raise invalid("tokens", "tokens: is required")
        token_ids(tokens, model.card.vocab_size, "tokens")
        work = partial(model.tokenizer.decode, tokens, False)
        text = await run_in_pool(frontend.pool, generation, work, doubtful=len(tokens) > model.card.max_model_len)
    return _json({"prompt": text})


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> Response:
    """The tokenizer's own configuration and the chat template, for clients that tokenize through this service."""
    model = frontend_of(request).models.find(request.query_params.get("model"), key_of(request))
    template = model.card.chat_template
    return _json({**model.tokenizer.config, **model.tokenizer.special_tokens, "chat_template": template})


def _json(value: dict[str, Any]) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")
