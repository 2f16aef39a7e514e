"""Bodies of `/v1/completions` and `/v1/chat/completions`."""

from __future__ import annotations

from typing import Any

from scheduler_svc.frontend import (
    chat,
    completions,
    parameters,
    prompts,
    reading,
    scheduling,
    token_fields,
    unsupported,
)
from scheduler_svc.frontend.chat_template import RESERVED
from scheduler_svc.frontend.messages import MAX_MESSAGES, ROLES
from scheduler_svc.frontend.openapi import bounding
from scheduler_svc.frontend.openapi.schemas import (
    STRING,
    Schema,
    array,
    body,
    choice,
    constant,
    field,
    nullable,
    record,
    ref,
    whole,
)
from scheduler_svc.frontend.openapi.tool_calling import tool_properties
from scheduler_svc.http.field_kinds import Field

SHARED: tuple[Field, ...] = (
    parameters.MODEL,
    parameters.N,
    parameters.TEMPERATURE,
    parameters.TOP_P,
    parameters.TOP_K,
    parameters.MIN_P,
    parameters.REPETITION_PENALTY,
    parameters.PRESENCE_PENALTY,
    parameters.FREQUENCY_PENALTY,
    parameters.SEED,
    parameters.MIN_TOKENS,
    parameters.IGNORE_EOS,
    parameters.STREAM,
    parameters.INCLUDE_STOP,
    parameters.SKIP_SPECIAL_TOKENS,
    parameters.ADD_SPECIAL_TOKENS,
    parameters.REQUEST_ID,
    scheduling.PRIORITY,
    scheduling.USER,
    scheduling.DEADLINE_MS,
    scheduling.SALT,
    token_fields.RETURN_TOKEN_IDS,
    token_fields.RETURN_TOKENS_AS_TOKEN_IDS,
    token_fields.TRUNCATE_PROMPT_TOKENS,
    token_fields.PROMPT_LOGPROBS,
)
COMPLETION: tuple[Field, ...] = (completions.LOGPROBS, completions.ECHO, unsupported.BEST_OF)
CHAT: tuple[Field, ...] = (chat.LOGPROBS, chat.TOP_LOGPROBS, reading.INCLUDE_REASONING)
RENDERING: tuple[Field, ...] = (prompts.CONTINUE_FINAL_MESSAGE, prompts.ADD_GENERATION_PROMPT)
"""Fields that bear on the chat template."""

TOKEN: Schema = {"type": "integer", "minimum": 0, "description": "a token id, below the model's vocabulary size"}
NOTES = {
    "model": "One of GET /v1/models; absent or empty: the only one that is served.",
    "prompt": "One prompt or several, as text or as token ids.",
    "messages": "The conversation. Only text content is supported.",
    "n": "Sequences for each prompt. Prompts times n are bounded too.",
    "temperature": "0 is greedy. A model's own generation_config may have other defaults.",
    "top_k": "-1 and 0: off.",
    "repetition_penalty": "Over prompt and generated tokens.",
    "presence_penalty": "Over generated tokens.",
    "frequency_penalty": "Over generated tokens.",
    "seed": "-1: random. Sequence i of n draws with seed + i.",
    "max_tokens": "Absent: 16 for completions; for chat what is left of the context.",
    "max_completion_tokens": "Goes before max_tokens.",
    "min_tokens": "Must not exceed max_tokens.",
    "ignore_eos": "Does not switch off stop_token_ids.",
    "stop": f"Ends the text; at most {parameters.MAX_STOP_CHARACTERS} characters together.",
    "stop_token_ids": "These end the text like an EOS token.",
    "logit_bias": "By token id, added to its logit.",
    "logprobs": "Natural logs of the model's raw distribution; negative infinity is written -9999.0.",
    "top_logprobs": "Alternatives to tell for each token; needs logprobs.",
    "echo": "The prompt is part of the text, and with logprobs its scores are told.",
    "stream": "The answer comes as server-sent events.",
    "stream_options": "Only with stream=true.",
    "priority": "A lower number runs earlier; never earlier than the API key's best_priority.",
    "user": "The tenant, where neither the API key nor the header X-Tenant names one.",
    "deadline_ms": "From arrival: when the answer is wanted. Counts under --discipline deadline; ends nothing.",
    "cache_salt": "Cached prefixes are shared only among requests with the same one.",
    "prompt_cache_retention": "How this request's prefix blocks are kept after it.",
    "request_id": "Goes before the header X-Request-Id.",
    "add_special_tokens": "Absent: true for text prompts, false for messages, whose template writes them.",
    "return_token_ids": "Those of the prompt and of the answer, as many as the usage counts.",
    "return_tokens_as_token_ids": "In logprobs, as token_id:5.",
    "truncate_prompt_tokens": "The last so many of a longer prompt are kept; -1: what fits beside max_tokens.",
    "prompt_logprobs": "Alternatives to tell for each token of the prompt; not with stream=true.",
    "include_reasoning": "false: the reasoning is left out of the answer.",
    "best_of": "Accepted only with the value of n.",
    "chat_template_kwargs": "Variables for the chat template; names are Python identifiers.",
    "continue_final_message": "Excludes add_generation_prompt.",
    "add_generation_prompt": "Absent: true, unless continue_final_message is set.",
    **bounding.NOTES,
}


def by_name(kinds: tuple[Field, ...]) -> dict[str, Schema]:
    return {kind.name: field(kind) for kind in kinds}


def _shared(max_tokens_names: tuple[str, ...]) -> dict[str, Schema]:
    """Properties that both kinds of completion have."""
    stop = {"type": "string", "minLength": 1, "maxLength": parameters.MAX_STOP_CHARACTERS}
    bias = field(parameters.BIAS)
    del bias["default"]
    properties = by_name(SHARED) | by_name(tuple(map(parameters.max_tokens_field, max_tokens_names)))
    properties["cache_salt"]["minLength"] = 1
    properties["truncate_prompt_tokens"]["not"] = constant(0)
    properties |= bounding.properties()
    return properties | {
        "prompt_cache_retention": {**choice(scheduling.RETENTIONS), "default": scheduling.RETENTION.default},
        "stop": {"anyOf": [stop, array(stop, maxItems=parameters.MAX_STOPS)]},
        "stop_token_ids": array(TOKEN, maxItems=parameters.MAX_STOP_TOKENS),
        "logit_bias": {
            "type": "object",
            "propertyNames": {"pattern": whole(parameters.BIAS_KEY)},
            "additionalProperties": bias,
        },
        "stream_options": record(
            {
                parameters.INCLUDE_USAGE.name: nullable(field(parameters.INCLUDE_USAGE)),
                parameters.CONTINUOUS_USAGE.name: nullable(field(parameters.CONTINUOUS_USAGE)),
            },
            required=(),
        ),
        **{name: {"description": "Accepted and ignored."} for name in parameters.IGNORED},
    }


def refused(table: dict[str, tuple[Any, ...]]) -> dict[str, Schema]:
    """Fields that are not supported, with the values that ask for nothing."""
    text = "Not supported: refused unless it asks for nothing."
    return {name: {**choice((*neutral, None)), "description": text} for name, neutral in table.items()}


def _body(properties: dict[str, Schema], required: str, table: dict[str, tuple[Any, ...]]) -> Schema:
    schema = body(properties, (required,), NOTES)
    schema["properties"] |= refused(table)
    return schema


def completion_body() -> Schema:
    ids = array(TOKEN, minItems=1)
    prompt = {"anyOf": [STRING, array(STRING, minItems=1), ids, array(ids, minItems=1)]}
    properties = {"prompt": prompt, **_shared(completions.MAX_TOKENS_NAMES), **by_name(COMPLETION)}
    return _body(properties, "prompt", unsupported.COMPLETIONS)


def rendering() -> dict[str, Schema]:
    """The messages and the properties that bear on how they are rendered."""
    return {
        "messages": array(ref("Message"), minItems=1, maxItems=MAX_MESSAGES),
        "chat_template_kwargs": {"type": "object", "propertyNames": {"not": choice(RESERVED)}},
        **by_name(RENDERING),
        **tool_properties(),
    }


def chat_body() -> Schema:
    properties = {**rendering(), **_shared(chat.MAX_TOKENS_NAMES), **by_name(CHAT)}
    return _body(properties, "messages", unsupported.CHAT)


def message_schema() -> Schema:
    """One message. Other properties reach the chat template as they are."""
    part = {"anyOf": [STRING, record({"type": constant("text"), "text": STRING})]}
    content = {"anyOf": [STRING, array(part)]}
    arguments = {"description": "JSON text, as clients send it, or the value itself."}
    function = record({"name": STRING, "arguments": arguments}, required=("name",))
    calls = array(record({"function": function}))
    shared = {"name": nullable(STRING), "tool_calls": nullable(calls), "tool_call_id": nullable(STRING)}
    others = [role for role in ROLES if role != "assistant"]
    return {
        "anyOf": [
            record({"role": choice(others), "content": content, **shared}, required=("role", "content")),
            record({"role": constant("assistant"), "content": nullable(content), **shared}, required=("role",)),
        ]
    }
