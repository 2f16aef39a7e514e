"""From a request to its sequences, or to what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from hashlib import blake2b

import numpy as np

from common.wire import ModelCard, Retention, Submit
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.sequence import Sequence


def misfit(request: Submit, model: ModelCard, kv_tokens: int) -> str:
    """Why a model whose largest pool holds KV of so many tokens can never serve a request; empty when it can."""
    length = len(request.prompt) + request.params.max_tokens
    if length > model.max_model_len:
        return f"prompt and max_tokens make {length} tokens, the model's context holds {model.max_model_len}"
    if length - 1 > kv_tokens:
        return f"prompt and max_tokens need KV for {length - 1} tokens, the largest pool holds {kv_tokens}"
    if int(request.prompt.min()) < 0 or int(request.prompt.max()) >= model.vocab_size:
        return "a prompt token lies outside the vocabulary"
    if request.params.max_tokens < 1:
        return "max_tokens must be at least 1"
    return ""


def sequences_of(
    owner: int, request: Submit, first_number: int, now: float, config: SchedulerConfig
) -> Iterator[Sequence]:
    """The `n` sequences of a request, numbered from `first_number`."""
    prompt = np.array(request.prompt, np.int32)
    deadline = now + (request.deadline_ms / 1000 or config.default_deadline_s)
    root = request.salt
    if config.isolate_tenants:
        root = blake2b(root, digest_size=16, key=blake2b(request.tenant.encode()).digest()).digest()
    for index in range(request.n):
        seed = (request.params.seed + index) % (1 << 64)
        yield Sequence(
            owner=owner,
            stream=request.first_stream + index,
            index=index,
            request_id=request.request_id,
            model=request.model,
            params=replace(request.params, seed=seed) if index else request.params,
            priority=request.priority,
            rank=request.priority,
            number=first_number + index,
            arrived=now,
            deadline=deadline,
            tokens=prompt,
            prompt_length=len(prompt),
            tenant=request.tenant,
            salt=root,
            retention=Retention(request.retention),
        )
