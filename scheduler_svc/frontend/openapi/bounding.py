"""Fields that bound what an answer may be."""

from __future__ import annotations

from common.wire.constraint import MAX_BAD_WORDS
from scheduler_svc.frontend.constraints import fields
from scheduler_svc.frontend.openapi.schemas import STRING, Schema, array, constant, field, nullable, record
from scheduler_svc.frontend.parameters import MAX_TOKENS

SCHEMA: Schema = {"type": ["object", "boolean"], "description": "a JSON schema"}
SOURCE: Schema = {"type": "string", "minLength": 1, "maxLength": fields.MAX_CHARACTERS}
WORD: Schema = {"type": "string", "minLength": 1}
TOKEN: Schema = {"type": "integer", "minimum": 0, "maximum": MAX_TOKENS}
NOTES = {
    "response_format": "The answer is text, a JSON object, or JSON that keeps to a schema. With strict=false, what of "
    "a schema cannot be enforced is passed over; otherwise it is refused.",
    "structured_outputs": "vLLM's name for the same: exactly one of json, regex, choice, grammar, json_object.",
    "guided_json": "As structured_outputs.json.",
    "guided_regex": "As structured_outputs.regex: the whole text matches.",
    "guided_choice": "As structured_outputs.choice.",
    "guided_grammar": "As structured_outputs.grammar: EBNF with the rule root.",
    "guided_json_object": "As structured_outputs.json_object.",
    "allowed_token_ids": "No other token is drawn.",
    "bad_words": "Words that are not generated; a grammar and allowed_token_ids go before them.",
}


def properties() -> dict[str, Schema]:
    """By name; the descriptions are `NOTES`."""
    kinds = _kinds()
    inside = {
        **kinds,
        fields.JSON_OBJECT.name: field(fields.JSON_OBJECT),
        fields.COMPACT.name: field(fields.COMPACT),
    }
    return {
        "response_format": {"anyOf": _formats()},
        # Not an object of the document's own kind: its fields are read only where it is given.
        "structured_outputs": {"anyOf": [record({n: nullable(s) for n, s in inside.items()}, required=())]},
        **{f"guided_{name}": schema for name, schema in kinds.items()},
        fields.GUIDED_JSON_OBJECT.name: field(fields.GUIDED_JSON_OBJECT),
        "allowed_token_ids": array(TOKEN, minItems=1),
        "bad_words": array(WORD, maxItems=MAX_BAD_WORDS // 2),
    }


def _kinds() -> dict[str, Schema]:
    return {
        "json": {"anyOf": [SCHEMA, {"type": "string", "description": "the text of a JSON schema"}]},
        "regex": SOURCE,
        "choice": array(WORD, minItems=1, maxItems=fields.MAX_CHOICES),
        "grammar": SOURCE,
    }


def _formats() -> list[Schema]:
    named = {
        "name": STRING,
        "description": STRING,
        "schema": SCHEMA,
        fields.STRICT.name: nullable(field(fields.STRICT)),
    }
    return [
        record({"type": constant("text")}),
        record({"type": constant("json_object")}),
        record({"type": constant("json_schema"), "json_schema": record(named, required=("schema",))}),
    ]
