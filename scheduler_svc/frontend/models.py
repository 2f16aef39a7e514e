"""The models that can be asked for, as the core announced them, each with its tokenizer and chat template."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any

import structlog

from common.wire import ModelCard, Serving
from scheduler_svc.frontend.chat_template import ChatTemplate
from scheduler_svc.frontend.no_tokenizer import NoTokenizer
from scheduler_svc.frontend.tokenizer import Tokenizer, TokenizerError
from scheduler_svc.http.errors import ApiError, invalid, unavailable
from scheduler_svc.keys import ANYBODY, ApiKey

log = structlog.get_logger()

USUAL_CHARACTERS = 8
"""Of a token, at most, in ordinary text: in English and in code it has 3 to 5."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model. `kv_capacity`: tokens of KV in the largest pool."""

    card: ModelCard
    tokenizer: Tokenizer
    template: ChatTemplate
    tool_template: ChatTemplate
    """For requests with tools; mostly the same."""
    kv_capacity: int
    created: int

    @property
    def name(self) -> str:
        return self.card.name

    @property
    def longest_text(self) -> int:
        """Characters above which no text can fit the context, whatever it says."""
        return self.card.max_model_len * self.tokenizer.longest_token

    @property
    def usual_text(self) -> int:
        """Characters above which ordinary text does not fit the context; some text does."""
        return self.card.max_model_len * USUAL_CHARACTERS

    def token_id(self, text: str) -> int | None:
        """The token that the vocabulary writes so, if the model has it."""
        token = self.tokenizer.token_id(text)
        return token if token is not None and token < self.card.vocab_size else None

    def describe(self) -> dict[str, Any]:
        """The entry of `/v1/models`."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "gilir",
            "root": self.name,
            "parent": None,
            "max_model_len": self.card.max_model_len,
        }


class Models:
    """The served models by name. A `Serving` takes effect as a whole, once all its tokenizers are built."""

    def __init__(self, builder: Executor) -> None:
        """`builder`: where tokenizers are built; not where texts wait for their turn."""
        self._builder = builder
        self._served: dict[str, ServedModel] = {}
        self._announcements = 0

    async def update(self, serving: Serving) -> bool:
        """Take over an announcement, unless a later one has come meanwhile. Returns whether it was taken over."""
        self._announcements += 1
        number = self._announcements
        loop = asyncio.get_running_loop()
        served: dict[str, ServedModel] = {}
        for card, capacity in zip(serving.models, serving.kv_capacity, strict=False):
            known = self._served.get(card.name)
            if known is not None and _alike(known.card, card):
                served[card.name] = replace(known, card=card, kv_capacity=capacity)
                continue
            try:
                served[card.name] = await loop.run_in_executor(self._builder, _build, card, capacity)
            except TokenizerError as error:
                log.error("model not served", model=card.name, reason=str(error))
        if number != self._announcements:
            return False
        self._served = served
        return True

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._served.values())

    def __len__(self) -> int:
        return len(self._served)

    def open_to(self, key: ApiKey) -> list[ServedModel]:
        """Those that a key may use."""
        return [model for model in self if key.allows(model.name)]

    def find(self, name: str | None, key: ApiKey = ANYBODY) -> ServedModel:
        """The named model; without a name, the only one that the key may use. Raises `ApiError`."""
        if not self._served:
            raise unavailable("no model is served now: no executor that takes requests is attached", "no_model")
        if not name:
            models = self.open_to(key)
            if len(models) == 1:
                return models[0]
            raise invalid("model", "model: is required, as several are served; GET /v1/models lists them")
        model = self._served.get(name)
        if model is None or not key.allows(name):
            shown = name if len(name) <= 100 else name[:100] + "…"
            text = f"The model {shown!r} does not exist. GET /v1/models lists those that do."
            raise ApiError(404, text, param="model", code="model_not_found")
        return model


def _alike(one: ModelCard, other: ModelCard) -> bool:
    """Whether the built tokenizer and template can stay."""
    templates = (one.chat_template, one.tool_chat_template), (other.chat_template, other.tool_chat_template)
    return one.tokenizer_files == other.tokenizer_files and templates[0] == templates[1]


def _build(card: ModelCard, capacity: int) -> ServedModel:
    tokenizer = Tokenizer(card.tokenizer_files) if "tokenizer.json" in card.tokenizer_files else NoTokenizer()
    template = tool_template = ChatTemplate(card.chat_template, tokenizer.special_tokens)
    if card.tool_chat_template:
        tool_template = ChatTemplate(card.tool_chat_template, tokenizer.special_tokens)
    log.info("model served", model=card.name, sampling_defaults=card.default_params, context=card.max_model_len)
    return ServedModel(card, tokenizer, template, tool_template, capacity, int(time.time()))
