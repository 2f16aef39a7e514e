"""What an executor must be like to attach beside those that are there."""

from __future__ import annotations

from collections.abc import Mapping

from common.wire import Limits, ModelCard
from scheduler_svc.core.lane import Lane

MAX_MODELS = 64
MAX_LANES = 1024
"""What frontends and operators are told of all executors travels in one message."""
MAX_CARD_BYTES = 192 << 20
"""Tokenizer files of all models together: they travel to a frontend in one message."""


class AttachError(Exception):
    """An executor does not fit beside those already attached."""


def check_alike(lane: Lane, model: ModelCard, limits: Limits) -> None:
    """Raise `AttachError` unless an executor would give the same answers as the one of this lane of its model."""
    mine, other = lane.model, model
    for field, one, two in (
        ("weights or dtype (the fingerprint)", mine.fingerprint, other.fingerprint),
        ("vocab_size", mine.vocab_size, other.vocab_size),
        ("max_model_len", mine.max_model_len, other.max_model_len),
        ("eos_ids", sorted(mine.eos_ids), sorted(other.eos_ids)),
        ("tokenizer", mine.tokenizer_files, other.tokenizer_files),
        ("chat template", mine.chat_template, other.chat_template),
        ("chat template for tools", mine.tool_chat_template, other.tool_chat_template),
        ("sampling default", mine.default_params, other.default_params),
        ("block_size", lane.block_size, limits.block_size),
    ):
        if one != two:
            raise AttachError(f"model {mine.name!r} is served by {lane.name!r} with another {field}")


def cards_fit(models: Mapping[str, ModelCard], model: ModelCard) -> bool:
    """Whether the cards of these models and one more are few and small enough."""
    cards = {**models, model.name: model}.values()
    size = sum(len(data) for card in cards for data in card.tokenizer_files.values())
    return len(cards) <= MAX_MODELS and size <= MAX_CARD_BYTES
