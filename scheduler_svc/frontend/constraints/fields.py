"""The fields that bound an answer: `response_format` and its like, `allowed_token_ids`, `bad_words`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from common.wire import Constraint, Language
from common.wire.constraint import MAX_BAD_WORDS
from scheduler_svc.frontend.models import ServedModel
from scheduler_svc.frontend.no_tokenizer import NoTokenizer
from scheduler_svc.frontend.parameters import token_ids
from scheduler_svc.http.errors import ApiError, invalid
from scheduler_svc.http.field_kinds import Boolean
from scheduler_svc.http.fields import Fields, show

MAX_CHARACTERS = 1 << 16
"""Of the source of a grammar."""
MAX_CHOICES = 4096
MAX_BAD_WORD_TOKENS = 8192
"""Of all bad words together."""
ANY_OBJECT = '{"type":"object"}'
STRICT = Boolean("strict", None)
JSON_OBJECT = Boolean("json_object", False)
GUIDED_JSON_OBJECT = Boolean("guided_json_object", False)
COMPACT = Boolean("disable_any_whitespace", False)
_NEUTRAL = ("disable_fallback", "disable_additional_properties")
"""Settings of other engines that change nothing here: nothing is fallen back to, and no other property is written."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar as a request gives it."""

    language: Language
    source: str
    param: str
    """The field that it comes from."""
    lenient: bool = False
    """What cannot be enforced of it may be passed over."""
    schema: Any = None
    """Of a JSON schema, the parsed source."""


def read_grammar(fields: Fields) -> Grammar | None:
    """The grammar that a request asks for, whatever the field. Raises `ApiError` 400."""
    found = [*_response_format(fields), *_structured_outputs(fields), *_guided(fields)]
    if len(found) > 1:
        raise invalid(found[1].param, f"{found[1].param}: {found[0].param} bounds the answer already; give one of them")
    if not found:
        return None
    grammar = found[0]
    if len(grammar.source) > MAX_CHARACTERS:
        raise invalid(grammar.param, f"{grammar.param}: longer than {MAX_CHARACTERS} characters")
    try:
        grammar.source.encode()
    except UnicodeEncodeError:
        raise invalid(grammar.param, f"{grammar.param}: has half a surrogate pair") from None
    return grammar


def _response_format(fields: Fields) -> list[Grammar]:
    value = fields.object("response_format", None)
    if value is None:
        return []
    inner = Fields(value, "response_format")
    kind = inner.raw("type")
    match kind:
        case "text":
            return []
        case "json_object":
            return [Grammar(Language.JSON_SCHEMA, ANY_OBJECT, "response_format")]
        case "json_schema":
            named = Fields(inner.object("json_schema", {}), "response_format.json_schema")
            schema = named.raw("schema")
            if schema is None:
                path = named.path("schema")
                raise invalid(path, f"{path}: is required with type json_schema")
            return [_schema(schema, named.path("schema"), lenient=STRICT.read(named) is False)]
        case "structural_tag":
            raise invalid(
                "response_format", "response_format: structural_tag is not supported", "unsupported_parameter"
            )
    raise invalid(
        "response_format", f"response_format.type: expected text, json_object or json_schema, got {show(kind)}"
    )


def _structured_outputs(fields: Fields) -> list[Grammar]:
    value = fields.object("structured_outputs", None)
    if value is None:
        return []
    inner = Fields(value, "structured_outputs")
    for name in _NEUTRAL:
        inner.raw(name)
    compact = COMPACT.read(inner)
    found = _grammars(inner, {name: name for name in ("json", "regex", "choice", "grammar")}, compact=compact)
    if JSON_OBJECT.read(inner):
        found.append(Grammar(_json(compact), ANY_OBJECT, inner.path("json_object")))
    for name in inner.unknown():
        if value[name] is not None:
            path = inner.path(name[:60])
            raise invalid(path, f"{path}: is not supported", "unsupported_parameter")
    return found


def _guided(fields: Fields) -> list[Grammar]:
    """The names that vLLM had before `structured_outputs`."""
    found = _grammars(fields, {name: f"guided_{name}" for name in ("json", "regex", "choice", "grammar")})
    if GUIDED_JSON_OBJECT.read(fields):
        found.append(Grammar(Language.JSON_SCHEMA, ANY_OBJECT, GUIDED_JSON_OBJECT.name))
    return found


def _grammars(fields: Fields, names: dict[str, str], *, compact: bool = False) -> list[Grammar]:
    """Those of the four kinds that are given, under these names."""
    found = []
    schema = fields.raw(names["json"])
    if schema is not None:
        found.append(_schema(schema, fields.path(names["json"]), language=_json(compact)))
    for kind, language in (("regex", Language.REGEX), ("grammar", Language.EBNF)):
        source = fields.text(names[kind], None, MAX_CHARACTERS)
        if source is not None:
            path = fields.path(names[kind])
            if not source:
                raise invalid(path, f"{path}: must not be empty")
            found.append(Grammar(language, source, path))
    choices = fields.array(names["choice"], None, MAX_CHOICES)
    if choices is not None:
        found.append(_choice(choices, fields.path(names["choice"])))
    return found


def _json(compact: bool) -> Language:
    return Language.JSON_SCHEMA_COMPACT if compact else Language.JSON_SCHEMA


def _schema(value: Any, path: str, *, language: Language = Language.JSON_SCHEMA, lenient: bool = False) -> Grammar:
    """A schema as an object, or as the text of one."""
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise invalid(path, f"{path}: is not valid JSON: {error}") from None
    if type(value) not in (dict, bool):
        raise invalid(path, f"{path}: expected a JSON schema, got {show(value)}")
    return Grammar(language, orjson.dumps(value).decode(), path, lenient, value)


def _choice(choices: list[Any], path: str) -> Grammar:
    if not choices or not all(isinstance(choice, str) and choice for choice in choices):
        raise invalid(path, f"{path}: expected strings that are not empty, and at least one")
    return Grammar(Language.EBNF, "root ::= " + " | ".join(map(_literal, choices)), path)


def _literal(text: str) -> str:
    """A string of the grammar language."""
    escapes = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return '"' + "".join(escapes.get(c, f"\\u{ord(c):04x}" if ord(c) < 0x20 else c) for c in text) + '"'


def read_constraint(fields: Fields, model: ServedModel, grammar: Grammar | None) -> Constraint:
    """The whole constraint. Raises `ApiError` 400."""
    vocab_size = model.card.vocab_size
    allowed = fields.array("allowed_token_ids", None, vocab_size)
    if allowed is not None and not allowed:
        raise invalid("allowed_token_ids", "allowed_token_ids: must not be empty")
    runs = _bad_words(fields, model)
    return Constraint(
        language=Language.NONE if grammar is None else grammar.language,
        source="" if grammar is None else grammar.source,
        allowed_ids=token_ids(allowed or [], vocab_size, "allowed_token_ids"),
        bad_widths=np.array([len(run) for run in runs], np.uint16),
        bad_ids=token_ids([token for run in runs for token in run], vocab_size, "bad_words"),
    )


def _bad_words(fields: Fields, model: ServedModel) -> list[list[int]]:
    """Each word as its tokens, alone and behind a space, which is how it begins within a text (vLLM's rule)."""
    words = fields.array("bad_words", [], MAX_BAD_WORDS // 2)
    if not words:
        return []
    if not all(isinstance(word, str) and word for word in words):
        raise invalid("bad_words", "bad_words: expected strings that are not empty")
    if isinstance(model.tokenizer, NoTokenizer):
        raise no_tokenizer("bad_words")
    if sum(map(len, words)) > MAX_BAD_WORD_TOKENS:
        raise invalid("bad_words", f"bad_words: longer than {MAX_BAD_WORD_TOKENS} characters together")
    runs: list[list[int]] = []
    for word in words:
        bare = word.lstrip()
        for text in (bare, " " + bare) if bare else (word,):
            run = model.tokenizer.encode(text, False)
            if run and run not in runs:
                runs.append(run)
    return runs


def no_tokenizer(param: str) -> ApiError:
    return invalid(param, f"{param}: the model brings no tokenizer, so its text cannot be bounded", "no_tokenizer")
