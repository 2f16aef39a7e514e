"""The model card: what an executor tells the scheduler of its model, gathered from the files of its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import structlog

from common.wire import ModelCard
from executor_svc.model.config import ModelConfig
from executor_svc.model.errors import ModelError
from executor_svc.model.fields import Fields, read_json
from executor_svc.model.gguf import GGUFModel
from executor_svc.model.gguf_tokenizer import end_ids, gguf_tokenizer
from executor_svc.model.tokenizer_files import TokenizerFiles, read_tokenizer_files

_MAX_TEMPLATE = 1 << 20
_BOUNDS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "top_k": (0.0, 0x7FFF_FFFF),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.0, 100.0),
}
_SAMPLING = ("temperature", "top_p", "top_k", "min_p")

log = structlog.get_logger()


class ChatTemplates(NamedTuple):
    """Jinja sources; empty where there is none."""

    default: str
    tool_use: str
    """Takes the other's place where a request has tools."""


def build_card(folder: Path, config: ModelConfig, fingerprint: bytes, name: str) -> ModelCard:
    """Read what the scheduler service needs to know. Raises `ModelError` on a malformed file or a missing tokenizer."""
    generation_file = folder / "generation_config.json"
    generation = read_json(generation_file) if generation_file.is_file() else {}
    files = read_tokenizer_files(folder)
    return _card(
        config,
        fingerprint,
        name,
        eos_ids=eos_ids(folder, config.vocab_size, generation, files),
        templates=chat_templates(folder),
        default_params=default_params(generation, str(generation_file)),
        tokenizer=files,
    )


def build_gguf_card(model: GGUFModel, config: ModelConfig, fingerprint: bytes, name: str) -> ModelCard:
    """The same of a GGUF file's metadata, which has no sampling defaults."""
    return _card(
        config,
        fingerprint,
        name,
        eos_ids=end_ids(model),
        templates=ChatTemplates(
            _bounded(model.field("tokenizer.chat_template") or "", model.path),
            _bounded(model.field("tokenizer.chat_template.tool_use") or "", model.path),
        ),
        default_params={},
        tokenizer=gguf_tokenizer(model),
    )


def _card(
    config: ModelConfig,
    fingerprint: bytes,
    name: str,
    *,
    eos_ids: tuple[int, ...],
    templates: ChatTemplates,
    default_params: dict[str, float],
    tokenizer: TokenizerFiles,
) -> ModelCard:
    card = ModelCard(
        name=name,
        fingerprint=fingerprint,
        vocab_size=config.vocab_size,
        max_model_len=config.max_model_len,
        eos_ids=eos_ids,
        dtype=config.dtype_name,
        chat_template=templates.default,
        tool_chat_template=templates.tool_use,
        default_params=default_params,
        tokenizer_files=tokenizer.contents,
    )
    log.info(
        "model card",
        model=card.name,
        fingerprint=fingerprint.hex(),
        dtype=card.dtype,
        max_model_len=card.max_model_len,
        eos_ids=card.eos_ids,
        default_params_from_generation_config=card.default_params,
        chat_template=bool(card.chat_template),
    )
    return card


def eos_ids(folder: Path, vocab_size: int, generation: dict[str, Any], tokenizer: TokenizerFiles) -> tuple[int, ...]:
    """Every token that ends a text: the union of `eos_token_id` in config.json and generation_config.json and of the
    tokenizer's `eos_token`. Ids that the model cannot sample are left out."""
    found: set[int] = set()
    for where, raw in (
        (folder / "config.json", read_json(folder / "config.json")),
        (folder / "generation_config.json", generation),
    ):
        value = raw.get("eos_token_id")
        values = value if isinstance(value, list) else [] if value is None else [value]
        if any(type(v) is not int for v in values):
            raise ModelError(f"{where}: eos_token_id: expected an integer or a list of them, got {value!r}")
        found.update(values)
    from_tokenizer = tokenizer.token_id("eos_token")
    if from_tokenizer is not None:
        found.add(from_tokenizer)
    beyond = sorted(i for i in found if not 0 <= i < vocab_size)
    if beyond:
        log.warning("eos ids outside the vocabulary are left out", ids=beyond, vocab_size=vocab_size)
    return tuple(sorted(found.difference(beyond)))


def default_params(generation: dict[str, Any], where: str) -> dict[str, float]:
    """Sampling defaults of generation_config.json, for requests that leave a field out.

    `repetition_penalty` is always taken; temperature, top_p, top_k and min_p unless `do_sample` is false there: then
    the file describes greedy search, and those numbers are idle in it. Raises `ModelError` on a value out of range.
    """
    fields = Fields(generation, where)
    names = ["repetition_penalty"]
    if fields.boolean("do_sample") or generation.get("do_sample") is None:
        names = [*_SAMPLING, *names]
    found = {}
    for name in names:
        value = fields.optional_number(name)
        if value is None:
            continue
        if name == "top_k" and value == -1:  # vLLM's way to say: off
            value = 0.0
        low, high = _BOUNDS[name]
        if not low <= value <= high or (name in ("top_p", "repetition_penalty") and value == 0):
            raise fields.error(name, f"{value:g} is out of range")
        found[name] = value
    return found


def chat_templates(folder: Path) -> ChatTemplates:
    """Where `transformers` looks: chat_template.jinja goes before tokenizer_config.json; of several templates those
    named `default` and `tool_use` count. Beside the former, the latter is a file of additional_chat_templates."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        tool_use = folder / "additional_chat_templates" / "tool_use.jinja"
        return ChatTemplates(_read_template(path), _read_template(tool_use) if tool_use.is_file() else "")
    path = folder / "tokenizer_config.json"
    value = read_json(path).get("chat_template") if path.is_file() else None
    named: dict[Any, Any] = {"default": value}
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
    return ChatTemplates(*(_named_template(named.get(name), path) for name in ("default", "tool_use")))


def _read_template(path: Path) -> str:
    try:
        return _bounded(path.read_text(encoding="utf-8"), path)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: {error}") from error


def _bounded(template: str, path: Path) -> str:
    if len(template) > _MAX_TEMPLATE:
        raise ModelError(f"{path}: chat template of {len(template)} characters; at most {_MAX_TEMPLATE}")
    return template


def _named_template(value: Any, path: Path) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ModelError(f"{path}: chat_template: expected text or a list of named templates")
    return _bounded(value, path)
