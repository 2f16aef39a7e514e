"""`POST /tokenize`, `POST /detokenize` and `GET /tokenizer_info`, in vLLM's shapes."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from scheduler_svc.frontend.body import parse_object, read_body
from scheduler_svc.frontend.chat_template import template_source
from scheduler_svc.frontend.client import ClientWatch
from scheduler_svc.frontend.errors import invalid
from scheduler_svc.frontend.fields import Fields
from scheduler_svc.frontend.frontend import Frontend, frontend_of
from scheduler_svc.frontend.models import ServedModel
from scheduler_svc.frontend.parameters import token_ids
from scheduler_svc.frontend.prompts import read_rendering, run_in_pool

router = APIRouter()

MAX_IDS = 1 << 22


async def _open(request: Request) -> tuple[Frontend, Fields, ServedModel, ClientWatch]:
    frontend = frontend_of(request)
    fields = Fields(parse_object(await read_body(request, frontend.settings.max_body_bytes)))
    model = frontend.models.find(fields.text("model", None, 1 << 20))
    return frontend, fields, model, ClientWatch(request.receive)


@router.post("/tokenize")
async def tokenize(request: Request) -> Response:
    """Token ids of a `prompt`, or of `messages` through the chat template."""
    frontend, fields, model, watch = await _open(request)
    try:
        text = fields.raw("prompt")
        if fields.raw("messages") is not None:
            text = await run_in_pool(frontend.pool, watch, read_rendering(fields, model))
            add_special_tokens = fields.boolean("add_special_tokens", False)
        elif type(text) is str:
            add_special_tokens = fields.boolean("add_special_tokens", True)
        else:
            raise invalid("prompt", "prompt: expected a string, or messages instead")
        with_strings = fields.boolean("return_token_strs", False)
        ids = await run_in_pool(frontend.pool, watch, model.tokenizer.encode, text, add_special_tokens)
    finally:
        watch.close()
    strings = [model.tokenizer.token_text(token) for token in ids] if with_strings else None
    return _json({"count": len(ids), "max_model_len": model.card.max_model_len, "tokens": ids, "token_strs": strings})


@router.post("/detokenize")
async def detokenize(request: Request) -> Response:
    """The text of `tokens`, special ones included."""
    frontend, fields, model, watch = await _open(request)
    try:
        tokens = fields.array("tokens", None, MAX_IDS)
        if tokens is None:
            raise invalid("tokens", "tokens: is required")
        token_ids(tokens, model.card.vocab_size, "tokens")
        text = await run_in_pool(frontend.pool, watch, model.tokenizer.decode, tokens, False)
    finally:
        watch.close()
    return _json({"prompt": text})


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> Response:
    """The tokenizer's own configuration and the chat template, for clients that tokenize through this service."""
    model = frontend_of(request).models.find(request.query_params.get("model"))
    source = template_source(model.card.chat_template, model.tokenizer.config)
    return _json({**model.tokenizer.config, **model.tokenizer.special_tokens, "chat_template": source})


def _json(value: dict[str, Any]) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")
