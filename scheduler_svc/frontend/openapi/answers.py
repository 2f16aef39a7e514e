"""Answers of the routes that generate text, tokenize it, and tell of models, requests and health."""

from __future__ import annotations

from typing import Any

from scheduler_svc.frontend.openapi.schemas import (
    COUNT,
    NUMBER,
    SECONDS,
    STRING,
    UNIX_TIME,
    Schema,
    array,
    choice,
    constant,
    nullable,
    record,
    ref,
)
from scheduler_svc.frontend.openapi.tool_calling import tool_call_deltas, tool_calls
from scheduler_svc.frontend.output import FINISH_REASONS
from scheduler_svc.frontend.shapes import ChatShape, CompletionShape

FINISH = choice(sorted(set(FINISH_REASONS.values())))
CHAT_FINISH = choice((*FINISH["enum"], "tool_calls"))
TOKEN_IDS: Schema = {**array(COUNT), "description": "With return_token_ids."}
IDS_OF_PROMPT = {"prompt_token_ids": TOKEN_IDS}
OF_CHUNKS = ("id", "object", "created", "model", "choices")
"""What each event of a stream has."""
STOP_REASON: Schema = {
    "type": ["string", "integer", "null"],
    "description": "The stop string or the id of the stop token that ended it.",
}
INDEX: Schema = {**COUNT, "description": "Choices are numbered prompt times n + i."}


def schemas() -> dict[str, Schema]:
    """The components, by name."""
    return {
        "Error": error(),
        "Usage": _usage(),
        "Completion": _completion(),
        "CompletionChunk": _completion_chunk(),
        "CompletionLogprobs": _completion_logprobs(),
        "ChatCompletion": _chat_completion(),
        "ChatCompletionChunk": _chat_completion_chunk(),
        "ChatLogprobs": record({"content": array(ref("ChatLogprob")), "refusal": {"type": "null"}}),
        "ChatLogprob": _chat_logprob(),
        "Model": _model(),
        "ModelList": record({"object": constant("list"), "data": array(ref("Model"))}),
        "Request": _request(),
        "Tokenized": _tokenized(),
        "Detokenized": record({"prompt": STRING}),
        "TokenizerInfo": _tokenizer_info(),
        "PromptLogprobs": _prompt_logprobs(),
        "Load": record({"server_load": {**COUNT, "description": "Sequences that wait or run."}}),
        "Version": record({"version": STRING}),
    }


def error() -> Schema:
    told = record(
        {
            "message": {"type": "string", "minLength": 1},
            "type": STRING,
            "param": {"type": ["string", "null"], "description": "The field at fault."},
            "code": {"type": ["string", "null"]},
        }
    )
    return record({"error": told})


def status(word: str) -> Schema:
    """What a health route says."""
    return record({"status": constant(word)})


def _usage() -> Schema:
    details = record({"cached_tokens": {**COUNT, "description": "Found in the prefix cache at the first admission."}})
    return record(
        {
            "prompt_tokens": COUNT,
            "completion_tokens": COUNT,
            "total_tokens": COUNT,
            "prompt_tokens_details": details,
        }
    )


def _answer(
    name: str, prefix: str, choices: Schema, usage: Schema, required: tuple[str, ...] = (), **more: Schema
) -> Schema:
    """`more`: members that are not always there."""
    head = {
        "id": {"type": "string", "pattern": f"^{prefix}", "description": f"{prefix} and the request's id"},
        "object": constant(name),
        "created": UNIX_TIME,
        "model": STRING,
        "choices": array(choices),
        "usage": usage,
    }
    return record({**head, **more}, required=required or head)


def _chunk_choice(member: dict[str, Schema], logprobs: Schema, finish: Schema, **more: Schema) -> Schema:
    """A choice of an event of a stream; one of its chunks has a finish reason."""
    parts = {"index": INDEX, **member, "logprobs": nullable(logprobs), "finish_reason": nullable(finish)}
    optional = {"stop_reason": STOP_REASON, "token_ids": TOKEN_IDS}
    return record({**parts, **optional, **more}, required=parts)


def _whole(member: dict[str, Schema], logprobs: Schema, finish: Schema, **more: Schema) -> Schema:
    """A choice of an answer that is not streamed. `more`: members that are not always there."""
    parts = {
        "index": INDEX, **member, "logprobs": nullable(logprobs), "finish_reason": finish, "stop_reason": STOP_REASON,
    }  # fmt: skip
    return record({**parts, "token_ids": TOKEN_IDS, **more}, required=parts)


def _completion() -> Schema:
    scores = {"prompt_logprobs": ref("PromptLogprobs")}
    choices = _whole({"text": STRING}, ref("CompletionLogprobs"), FINISH, **IDS_OF_PROMPT, **scores)
    return _answer(CompletionShape.object_name, CompletionShape.id_prefix, choices, ref("Usage"))


def _completion_chunk() -> Schema:
    shape = CompletionShape
    choices = _chunk_choice({"text": STRING}, ref("CompletionLogprobs"), FINISH, **IDS_OF_PROMPT)
    return _answer(shape.chunk_object_name, shape.id_prefix, choices, nullable(ref("Usage")), OF_CHUNKS)


def _completion_logprobs() -> Schema:
    top: Schema = {"type": ["object", "null"], "additionalProperties": NUMBER}
    return record(
        {
            "text_offset": array(COUNT),
            "token_logprobs": array(nullable(NUMBER)),
            "tokens": array(STRING),
            "top_logprobs": array(top),
        }
    )


def _chat_completion() -> Schema:
    always = {
        "role": constant("assistant"),
        "content": {**nullable(STRING), "description": "null where there are calls alone"},
        "refusal": {"type": "null"},
    }
    thoughts = {"reasoning_content": STRING, "reasoning": {**STRING, "description": "The same."}}
    message = record({**always, **thoughts, "tool_calls": tool_calls()}, required=always)
    choices = _whole({"message": message}, ref("ChatLogprobs"), CHAT_FINISH)
    more = {**IDS_OF_PROMPT, "prompt_logprobs": ref("PromptLogprobs")}
    return _answer(ChatShape.object_name, ChatShape.id_prefix, choices, ref("Usage"), (), **more)


def _chat_completion_chunk() -> Schema:
    shape = ChatShape
    said = {"role": constant("assistant"), "content": STRING, "reasoning_content": STRING}
    delta = record({**said, "tool_calls": tool_call_deltas()}, required=())
    choices = _chunk_choice({"delta": delta}, ref("ChatLogprobs"), CHAT_FINISH)
    usage = nullable(ref("Usage"))
    return _answer(shape.chunk_object_name, shape.id_prefix, choices, usage, OF_CHUNKS, **IDS_OF_PROMPT)


def _prompt_logprobs() -> Schema:
    rank: Schema = {"type": ["integer", "null"], "minimum": 1, "description": "null: not among those told"}
    told = record({"logprob": NUMBER, "rank": rank, "decoded_token": STRING})
    position: Schema = {"type": ["object", "null"], "additionalProperties": told}
    return {**array(position), "description": "By token id, for each token of the prompt; null for the first."}


def _chat_logprob() -> Schema:
    byte = {"type": "integer", "minimum": 0, "maximum": 255}
    token: dict[str, Any] = {"token": STRING, "logprob": NUMBER, "bytes": array(byte)}
    return record({**token, "top_logprobs": array(record(token))})


def _model() -> Schema:
    return record(
        {
            "id": STRING,
            "object": constant("model"),
            "created": UNIX_TIME,
            "owned_by": STRING,
            "root": STRING,
            "parent": {"type": "null"},
            "max_model_len": {"type": "integer", "minimum": 1, "description": "tokens of its context"},
        }
    )


def _request() -> Schema:
    state = choice(("waiting", "running"))
    sequence = record(
        {
            "index": COUNT,
            "state": state,
            "reason": {"type": "string", "description": "What keeps it out of the iteration now, or none."},
            "executor": nullable(STRING),
            "age_s": SECONDS,
            "waited_s": {"type": "object", "additionalProperties": SECONDS, "description": "By reason."},
            "priority": {"type": "integer", "description": "As lifted by ageing."},
            "prompt_tokens": COUNT,
            "computed_tokens": COUNT,
            "generated_tokens": COUNT,
            "cached_tokens": COUNT,
            "num_preemptions": COUNT,
        }
    )
    return record(
        {
            "id": STRING,
            "object": constant("request"),
            "model": STRING,
            "state": state,
            "num_waiting": {**COUNT, "description": "Sequences that wait for the same model."},
            "sequences": array(sequence, minItems=1),
        }
    )


def _tokenized() -> Schema:
    strings = {"type": ["array", "null"], "items": STRING, "description": "With return_token_strs."}
    return record({"count": COUNT, "max_model_len": COUNT, "tokens": array(COUNT), "token_strs": strings})


def _tokenizer_info() -> Schema:
    template = {"chat_template": nullable(STRING)}
    return record(template, description="The tokenizer's own configuration and its special tokens by name.")
