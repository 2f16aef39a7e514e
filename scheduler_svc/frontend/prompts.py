"""Prompts: from what a request says to token ids, without ever holding up the event loop for long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.frontend.chat_template import RESERVED
from scheduler_svc.frontend.messages import read_messages
from scheduler_svc.frontend.models import ServedModel
from scheduler_svc.frontend.parameters import token_ids
from scheduler_svc.frontend.streams import Generation
from scheduler_svc.frontend.text_threads import TextThreads
from scheduler_svc.frontend.tokenizer import TooManyTokens
from scheduler_svc.frontend.tools import Tooling
from scheduler_svc.http.errors import ApiError, invalid
from scheduler_svc.http.field_kinds import Boolean
from scheduler_svc.http.fields import Fields, show

T = TypeVar("T")
CONTINUE_FINAL_MESSAGE = Boolean("continue_final_message", False)
ADD_GENERATION_PROMPT = Boolean("add_generation_prompt", None)
INLINE_CHARACTERS = 4096
"""Texts up to this length are tokenized at once, about 3 ms; longer ones in a thread."""
MAX_TRUNCATED_CHARACTERS = 1 << 22
"""Of a text whose beginning is cut off."""
INLINE_BYTES = 16_384
"""Messages of bodies up to this size are rendered at once; those of larger ones in a thread."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: its ids, and its text; that of a completion where it was given as text and is whole."""

    ids: NDArray[np.int32]
    text: str | None


async def read_completion_prompts(
    fields: Fields,
    model: ServedModel,
    add_special_tokens: bool,
    pool: TextThreads,
    generation: Generation,
    keep: int | None = None,
) -> list[Prompt]:
    """`prompt`: a string, an array of strings, token ids, or an array of arrays of token ids.

    `keep`: of longer prompts the last so many tokens are kept.
    """
    raw = fields.raw("prompt")
    if raw is None:
        raise invalid("prompt", "prompt: is required")
    if type(raw) not in (str, list):
        raise invalid("prompt", f"prompt: expected a string or an array, got {show(raw)}")
    if not raw and type(raw) is list:
        raise invalid("prompt", "prompt: must not be empty")
    single = type(raw) is str or type(raw[0]) not in (str, list)
    items = [raw] if single else raw
    kind = type(items[0])
    prompts = []
    in_pool = sum(len(item) for item in items if type(item) is kind) > INLINE_CHARACTERS
    for i, item in enumerate(items):
        path = "prompt" if single else f"prompt[{i}]"
        if type(item) is not kind:
            raise invalid(path, f"{path}: all prompts must be of one kind, got {show(item)}")
        if isinstance(item, str):
            ids = await tokenize(
                item, model, add_special_tokens, "prompt", pool, generation, in_pool=in_pool, keep=keep
            )
            prompts.append(Prompt(ids, item if keep is None or len(ids) < keep else None))
        else:
            if in_pool:
                await asyncio.sleep(0)
            prompts.append(Prompt(_checked_ids(item if keep is None else item[-keep:], model, path), None))
        if not len(prompts[-1].ids):
            raise invalid("prompt", f"{path}: has no tokens", "empty_prompt")
    return prompts


def _checked_ids(ids: list[Any], model: ServedModel, path: str) -> NDArray[np.int32]:
    if len(ids) > model.card.max_model_len:
        raise too_long(model, "prompt", f"the prompt has {len(ids)}")
    return token_ids(ids, model.card.vocab_size, path)


async def read_chat_prompt(
    fields: Fields,
    model: ServedModel,
    add_special_tokens: bool,
    pool: TextThreads,
    generation: Generation,
    tooling: Tooling,
    keep: int | None = None,
) -> Prompt:
    """The messages through the chat template, which writes its own special tokens: none are added by default.

    `keep`: of a longer prompt the last so many tokens are kept; the prompt's text stays whole.
    """
    rendering = read_rendering(fields, model, tooling)
    doubtful = fields.size > model.usual_text
    inline = fields.size <= INLINE_BYTES
    text = rendering() if inline else await run_in_pool(pool, generation, rendering, doubtful=doubtful)
    in_pool = len(text) > INLINE_CHARACTERS
    ids = await tokenize(text, model, add_special_tokens, "messages", pool, generation, in_pool=in_pool, keep=keep)
    if not len(ids):
        raise invalid("messages", "messages: the chat template makes no tokens of them", "empty_prompt")
    return Prompt(ids, text)


def read_rendering(fields: Fields, model: ServedModel, tooling: Tooling) -> Callable[[], str]:
    """Check the messages and all that bears on the template. Returns what renders them, with these tools."""
    open_end = CONTINUE_FINAL_MESSAGE.read(fields)
    add_generation_prompt = ADD_GENERATION_PROMPT.read_or(fields, not open_end)
    if open_end and add_generation_prompt:
        raise invalid("continue_final_message", "continue_final_message: excludes add_generation_prompt")
    variables = fields.object("chat_template_kwargs", {})
    for name in variables:
        if name in RESERVED or not name.isidentifier():
            raise invalid("chat_template_kwargs", f"chat_template_kwargs: {show(name)} cannot be set")
    template = model.tool_template if tooling.tools else model.template
    fields.raw("messages")

    def render() -> str:
        messages = read_messages(fields, developer_as_system=not template.names_developer)
        if open_end:
            return template.render_open(messages, variables, tooling.tools)
        return template.render(messages, add_generation_prompt, variables, tooling.tools)

    return render


async def tokenize(
    text: str,
    model: ServedModel,
    add_special_tokens: bool,
    param: str,
    pool: TextThreads,
    generation: Generation,
    *,
    in_pool: bool,
    keep: int | None = None,
) -> NDArray[np.int32]:
    """Ids of a text. One that is too long by its characters alone is refused before it is tokenized.

    `keep`: only the last so many. Where a text's last tokens begin is known when all of it has been tokenized.
    """
    if len(text) > (model.longest_text if keep is None else max(model.longest_text, MAX_TRUNCATED_CHARACTERS)):
        raise too_long(model, param, f"the prompt has {len(text)} characters, more than any {model.card.max_model_len}")
    limit = model.card.max_model_len if keep is None else None
    try:
        if in_pool:
            work = partial(model.tokenizer.encode, text, add_special_tokens, limit)
            ids = await run_in_pool(pool, generation, work, doubtful=len(text) > model.usual_text)
        else:
            ids = model.tokenizer.encode(text, add_special_tokens, limit)
    except TooManyTokens as error:
        raise too_long(model, param, f"the prompt has {error.count}") from None
    array = np.array(ids if keep is None else ids[-keep:], np.int32)
    if len(array) > model.card.max_model_len:
        raise too_long(model, param, f"the prompt has {len(array)}")
    if len(array) and int(array.max()) >= model.card.vocab_size:
        raise invalid(param, f"{param}: holds a token that the tokenizer knows and the model does not")
    return array


async def run_in_pool(pool: TextThreads, generation: Generation, work: Callable[[], T], *, doubtful: bool) -> T:
    """Run in a thread. If the request ends before, raises what `Generation.check` raises, at once."""
    generation.check()
    future = pool.submit(generation.tenant, work, doubtful=doubtful)
    generation.on_stop = future.cancel
    try:
        return await future
    except asyncio.CancelledError:
        generation.check()
        raise
    finally:
        generation.on_stop = None


def too_long(model: ServedModel, param: str, what: str) -> ApiError:
    text = f"This model's context holds {model.card.max_model_len} tokens; {what}."
    return invalid(param, text, "context_length_exceeded")
