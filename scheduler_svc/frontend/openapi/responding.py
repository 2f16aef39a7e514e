"""Body, answer and events of `/v1/responses`."""

from __future__ import annotations

from scheduler_svc.frontend import chat, tools
from scheduler_svc.frontend.messages import MAX_MESSAGES
from scheduler_svc.frontend.openapi import generating
from scheduler_svc.frontend.openapi.bounding import SCHEMA
from scheduler_svc.frontend.openapi.schemas import (
    BOOLEAN,
    COUNT,
    NUMBER,
    STRING,
    UNIX_TIME,
    Schema,
    array,
    body,
    choice,
    constant,
    field,
    nullable,
    record,
    ref,
)
from scheduler_svc.frontend.openapi.tool_calling import allowed_tools
from scheduler_svc.frontend.responses import asked, items, output
from scheduler_svc.frontend.responses.form import ResponseShape

NOTES = generating.NOTES | {
    "input": "A text, or the items of the whole conversation: nothing is kept between requests.",
    "instructions": "A system message before the input.",
    "max_output_tokens": "Absent: what is left of the context.",
    "text": "The answer is text, a JSON object, or JSON that keeps to a schema.",
    "tools": "Functions that the model may call, each of its own name.",
    "tool_choice": "As of a chat.",
    "parallel_tool_calls": "false: one call at most.",
    "reasoning": "The effort reaches the chat template as reasoning_effort; none sets enable_thinking to false, too.",
    "include": "message.output_text.logprobs: those of the text's tokens are told. Reasoning is told as it is.",
    "top_logprobs": "Alternatives to tell for each token; needs message.output_text.logprobs in include.",
}
LOGPROBS = array(ref("ChatLogprob"))
STATUS = choice(("in_progress", "completed", "incomplete", "failed"))
ITEM_STATUS = choice(("in_progress", "completed", "incomplete"))


def create() -> Schema:
    """The body."""
    of_chat = generating.chat_body()["properties"]
    inner = {"effort": field(asked.EFFORT), "summary": field(asked.SUMMARY)}
    obfuscation = {asked.OBFUSCATION.name: nullable(field(asked.OBFUSCATION))}
    properties = {
        "input": {"anyOf": [STRING, array(_input_item(), minItems=1, maxItems=MAX_MESSAGES)]},
        items.INSTRUCTIONS.name: field(items.INSTRUCTIONS),
        asked.MAX_OUTPUT_TOKENS.name: field(asked.MAX_OUTPUT_TOKENS),
        "text": record({"format": nullable(_format()), "verbosity": choice(("medium", None))}, required=()),
        "tools": array(_tool(), maxItems=tools.MAX_TOOLS),
        "tool_choice": {"anyOf": [choice(tools.CHOICES), _named(), _allowed()]},
        "reasoning": record({name: nullable(schema) for name, schema in inner.items()}, required=()),
        "include": array(choice(asked.INCLUDES)),
        chat.TOP_LOGPROBS.name: field(chat.TOP_LOGPROBS),
        "stream_options": record(obfuscation, required=()),
    }
    schema = body(properties, ("input",), NOTES)
    schema["properties"] |= {name: of_chat[name] for name in (*asked.PASSED, "chat_template_kwargs")}
    schema["properties"]["metadata"] = {"type": ["object", "null"], "description": "Told again in the answer."}
    schema["properties"] |= generating.refused(asked.UNSUPPORTED)
    return schema


def _input_item() -> Schema:
    part = record({"type": choice(items.TEXT_PARTS), "text": STRING})
    content: Schema = {"anyOf": [STRING, array(part)]}
    kind = {"type": choice(("message", None))}
    message = {**kind, "role": choice(items.ROLES), "content": content}
    call = {"type": constant("function_call"), "call_id": STRING, "name": STRING, "arguments": STRING}
    thoughts = {
        "content": nullable(array(record({"type": constant("reasoning_text"), "text": STRING}))),
        "summary": nullable(array(record({"type": constant("summary_text"), "text": STRING}))),
    }
    return {
        "anyOf": [
            record(message, required=("role", "content")),
            record({"type": constant("reasoning"), **thoughts}, required=("type",)),
            record(call),
            record({"type": constant("function_call_output"), "call_id": STRING, "output": content}),
        ]
    }


def _format() -> Schema:
    named = {
        "type": constant("json_schema"),
        "name": nullable(STRING),
        "description": nullable(STRING),
        "schema": SCHEMA,
        "strict": nullable(BOOLEAN),
    }
    plain = record({"type": choice(("text", "json_object"))})
    return {"anyOf": [plain, record(named, required=("type", "schema"))]}


def _tool() -> Schema:
    function = {
        "type": constant("function"),
        "name": field(tools.NAME),
        "description": nullable(field(tools.DESCRIPTION)),
        "parameters": {"type": ["object", "null"], "description": "JSON Schema of its arguments."},
        "strict": nullable(field(tools.STRICT)),
    }
    return record(function, required=("type", "name"))


def _named() -> Schema:
    return record({"type": constant("function"), "name": field(tools.NAME)})


def _allowed() -> Schema:
    return record({"type": constant("allowed_tools"), **allowed_tools(_named())})


# --- answers ---


def schemas() -> dict[str, Schema]:
    """The components, by name."""
    return {
        "CreateResponse": create(),
        "Response": _response(),
        "ResponseItem": _item(),
        "ResponseEvent": {"anyOf": _events()},
    }


def _response() -> Schema:
    usage = record(
        {
            "input_tokens": COUNT,
            "input_tokens_details": record({"cached_tokens": COUNT}),
            "output_tokens": COUNT,
            "output_tokens_details": record({"reasoning_tokens": COUNT}),
            "total_tokens": COUNT,
        }
    )
    failure = record({"code": choice(("server_error", "rate_limit_exceeded")), "message": STRING})
    return record(
        {
            "id": {"type": "string", "pattern": f"^{ResponseShape.id_prefix}"},
            "object": constant(ResponseShape.object_name),
            "created_at": UNIX_TIME,
            "status": STATUS,
            "model": STRING,
            "output": array(ref("ResponseItem")),
            "usage": nullable(usage),
            "error": nullable(failure),
            "incomplete_details": nullable(record({"reason": constant("max_output_tokens")})),
            "temperature": NUMBER,
            "top_p": NUMBER,
            "background": constant(False),
            "previous_response_id": constant(None),
            "store": constant(False),
            "truncation": constant("disabled"),
            "instructions": nullable(STRING),
            "max_output_tokens": nullable(COUNT),
            "metadata": {"type": "object"},
            "parallel_tool_calls": BOOLEAN,
            "reasoning": record({"effort": nullable(STRING), "summary": nullable(STRING)}),
            "text": record({"format": {"type": "object"}}),
            "tool_choice": {"type": ["string", "object"]},
            "tools": array({"type": "object"}),
            "top_logprobs": COUNT,
            "user": nullable(STRING),
        }
    )


def _text_part() -> Schema:
    return record({"type": constant("output_text"), "text": STRING, "annotations": array({}), "logprobs": LOGPROBS})


def _thought_part() -> Schema:
    return record({"type": constant("reasoning_text"), "text": STRING})


def _item() -> Schema:
    def item(kind: output.Kind, **members: Schema) -> Schema:
        head = {"id": {"type": "string", "pattern": f"^{kind.prefix}_"}, "type": constant(kind.name)}
        return record({**head, "status": ITEM_STATUS, **members})

    return {
        "anyOf": [
            item(output.REASONING, summary=array({}), content=array(_thought_part())),
            item(output.MESSAGE, role=constant("assistant"), content=array(_text_part())),
            item(output.CALL, call_id=STRING, name=STRING, arguments=STRING),
        ]
    }


def _events() -> list[Schema]:
    """One schema for each type."""
    place = {"item_id": STRING, "output_index": COUNT}
    part = {**place, "content_index": COUNT}
    scores = {"logprobs": LOGPROBS}
    item = {"output_index": COUNT, "item": ref("ResponseItem")}
    parts: Schema = {"anyOf": [_text_part(), _thought_part()]}
    members: dict[str, dict[str, Schema]] = {
        "response.output_item.added": item,
        "response.output_item.done": item,
        "response.content_part.added": {**part, "part": parts},
        "response.content_part.done": {**part, "part": parts},
        f"{output.MESSAGE.event}.delta": {**part, "delta": STRING, **scores},
        f"{output.MESSAGE.event}.done": {**part, "text": STRING, **scores},
        f"{output.REASONING.event}.delta": {**part, "delta": STRING},
        f"{output.REASONING.event}.done": {**part, "text": STRING},
        f"{output.CALL.event}.delta": {**place, "delta": STRING},
        f"{output.CALL.event}.done": {**place, "arguments": STRING, "name": STRING},
    }
    for state in ("created", "in_progress", "completed", "incomplete", "failed"):
        members[f"response.{state}"] = {"response": ref("Response")}
    return [record({"type": constant(kind), "sequence_number": COUNT, **more}) for kind, more in members.items()]
