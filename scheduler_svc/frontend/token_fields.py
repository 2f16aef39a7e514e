"""Fields of a request that bear on token ids: those of prompt and answer, a prompt's scores, and its length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from scheduler_svc.frontend.logprobs import LogprobWriter, finite
from scheduler_svc.frontend.models import ServedModel
from scheduler_svc.frontend.parameters import MAX_LOGPROBS, MAX_TOKENS, Parameters
from scheduler_svc.frontend.streams import Scores
from scheduler_svc.http.errors import invalid
from scheduler_svc.http.field_kinds import Boolean, Integer
from scheduler_svc.http.fields import Fields

RETURN_TOKEN_IDS = Boolean("return_token_ids", False)
RETURN_TOKENS_AS_TOKEN_IDS = Boolean("return_tokens_as_token_ids", False)
TRUNCATE_PROMPT_TOKENS = Integer("truncate_prompt_tokens", None, -1, MAX_TOKENS)
PROMPT_LOGPROBS = Integer("prompt_logprobs", None, 0, MAX_LOGPROBS)


@dataclass(frozen=True, slots=True)
class TokenFields:
    """`ids`: they are told. `as_ids`: logprobs name tokens by id. `prompt_logprobs`: alternatives a position."""

    ids: bool = False
    as_ids: bool = False
    keep: int | None = None
    """Of a longer prompt the last so many tokens are kept."""
    prompt_logprobs: int | None = None


def read_token_fields(
    fields: Fields, parameters: Parameters, model: ServedModel, default_max_tokens: int
) -> TokenFields:
    """Read them. Raises `ApiError` 400."""
    scored = PROMPT_LOGPROBS.read(fields)
    if scored is not None and parameters.stream:
        raise invalid("prompt_logprobs", "prompt_logprobs: is not allowed with stream=true")
    return TokenFields(
        ids=RETURN_TOKEN_IDS.read(fields),
        as_ids=RETURN_TOKENS_AS_TOKEN_IDS.read(fields),
        keep=_read_keep(fields, parameters, model, default_max_tokens),
        prompt_logprobs=scored,
    )


def _read_keep(fields: Fields, parameters: Parameters, model: ServedModel, default_max_tokens: int) -> int | None:
    """-1: what fits beside the answer that is asked for."""
    keep = TRUNCATE_PROMPT_TOKENS.read(fields)
    if keep == 0:
        raise invalid("truncate_prompt_tokens", "truncate_prompt_tokens: must be -1 or above 0, got 0")
    if keep != -1:
        return keep
    room = min(model.card.max_model_len, model.kv_capacity + 1)
    return max(1, room - (parameters.max_tokens or max(default_max_tokens, parameters.sampling.min_tokens)))


def prompt_logprobs(prompt: list[int], scores: list[Scores | None], top: int, writer: LogprobWriter) -> list[Any]:
    """vLLM's shape: for each position its alternatives by token id; null for the first, which has none."""
    return [
        None if entry is None else _position(token, entry, top, writer)
        for token, entry in zip(prompt, scores, strict=True)
    ]


def _position(token: int, entry: Scores, top: int, writer: LogprobWriter) -> dict[str, Any]:
    """The `top` most likely ones, and the prompt's own token. A rank is null where it is not among those told."""
    ids, values = entry
    ranked = list(zip(ids[1 : 1 + top], values[1 : 1 + top], strict=True))
    ranks = {other: rank for rank, (other, _) in enumerate(ranked, 1)}
    return {
        str(other): {
            "logprob": finite(value),
            "rank": ranks.get(other),
            "decoded_token": writer.token_string(other),
        }
        for other, value in ((token, values[0]), *ranked)
    }
