"""Tools in requests, and calls of them in answers."""

from __future__ import annotations

from scheduler_svc.frontend import tools
from scheduler_svc.frontend.openapi.schemas import (
    COUNT,
    STRING,
    Schema,
    array,
    choice,
    constant,
    field,
    nullable,
    record,
)

CHOICE_NOTE = (
    "none: the model is not told of the tools. required, or a function of theirs: the answer is bound to be calls, and "
    "nothing else. allowed_tools: the model is told of all, but only these are called."
)


def tool_properties() -> dict[str, Schema]:
    """Of a body whose messages are rendered."""
    function = record(
        {
            "name": field(tools.NAME),
            "description": nullable(field(tools.DESCRIPTION)),
            "parameters": {"type": ["object", "null"], "description": "JSON Schema of its arguments."},
            "strict": {
                **nullable(field(tools.STRICT)),
                "description": "Of a forced call: what of its schema cannot be enforced is refused, not passed over.",
            },
        },
        required=("name",),
    )
    tool = record({"type": choice(("function", None)), "function": function}, required=("function",))
    return {
        "tools": array(tool, maxItems=tools.MAX_TOOLS, description="What the model may call, each of its own name."),
        "tool_choice": {"anyOf": [choice(tools.CHOICES), _named(), _allowed()], "description": CHOICE_NOTE},
        "parallel_tool_calls": {
            **field(tools.PARALLEL_TOOL_CALLS), "description": "false: one call at most.",
        },
    }  # fmt: skip


def _named() -> Schema:
    return record({"type": constant("function"), "function": record({"name": field(tools.NAME)})})


def _allowed() -> Schema:
    allowed = record(allowed_tools(_named()))
    return record({"type": constant("allowed_tools"), "allowed_tools": allowed})


def allowed_tools(named: Schema) -> dict[str, Schema]:
    """Properties of a choice of tools, each as `named`."""
    return {"mode": choice(tools.MODES), "tools": array(named, minItems=1, maxItems=tools.MAX_TOOLS)}


def tool_calls() -> Schema:
    """Of a whole message."""
    function = record({"name": STRING, "arguments": {**STRING, "description": "As the model wrote them."}})
    return array(record({"id": STRING, "type": constant("function"), "function": function}), minItems=1)


def tool_call_deltas() -> Schema:
    """Of a chunk. A call's first has its id and name, those after it more of its arguments."""
    begins = record({"name": STRING, "arguments": constant("")})
    first = record({"index": COUNT, "id": STRING, "type": constant("function"), "function": begins})
    more = record({"index": COUNT, "function": record({"arguments": STRING})})
    return array({"anyOf": [first, more]}, minItems=1, maxItems=1)
