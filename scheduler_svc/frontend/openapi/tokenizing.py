"""Bodies of `/tokenize` and `/detokenize`."""

from __future__ import annotations

from scheduler_svc.frontend import parameters, tokenization
from scheduler_svc.frontend.openapi.generating import NOTES, TOKEN, by_name, rendering
from scheduler_svc.frontend.openapi.schemas import Schema, array, body, constant

SHARED = (parameters.MODEL, parameters.ADD_SPECIAL_TOKENS, tokenization.RETURN_TOKEN_STRS)


def tokenize_text() -> Schema:
    properties = {tokenization.PROMPT.name: by_name((tokenization.PROMPT,))["prompt"], **by_name(SHARED)}
    schema = body(properties, ("prompt",), NOTES)
    schema["properties"]["messages"] = constant(None)
    return schema


def tokenize_messages() -> Schema:
    properties = {**rendering(), **by_name((*SHARED, tokenization.PROMPT))}
    return body(properties, ("messages",), NOTES | {"prompt": "Ignored beside messages."})


def detokenize_body() -> Schema:
    properties = {"tokens": array(TOKEN, maxItems=tokenization.MAX_IDS), **by_name((parameters.MODEL,))}
    return body(properties, ("tokens",), NOTES)
