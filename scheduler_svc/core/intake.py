"""From a request to its sequences, or to what is wrong with it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from hashlib import blake2b

import numpy as np

from common.wire import Ended, EndReason, ModelCard, Retention, Submit
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.drain_rate import DrainRate
from scheduler_svc.core.model_queue import ModelQueue
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


def outlived(sequence: Sequence, model: ModelCard) -> str:
    """Why a newly attached model cannot go on with a waiting sequence; empty when it can."""
    if sequence.num_generated and sequence.fingerprint != model.fingerprint:
        return "the model was replaced while the answer was being written"
    if sequence.max_length > model.max_model_len or int(sequence.tokens.max()) >= model.vocab_size:
        return "the model was replaced by one that cannot hold this request"
    return ""


def streams_of(requests: tuple[Submit, ...]) -> range:
    """The stream numbers of a call."""
    return range(requests[0].first_stream, requests[-1].first_stream + requests[-1].n)


def overload(
    requests: tuple[Submit, ...], queue: ModelQueue, config: SchedulerConfig, drain_rate: DrainRate
) -> Ended | None:
    """The answer to a call for which its model's queue has no room; None when it has.

    Who was preempted takes none of it.
    """
    num_sequences = len(streams_of(requests))
    num_tokens = sum(request.n * len(request.prompt) for request in requests)
    if num_sequences > config.max_waiting:
        text = f"at most {config.max_waiting} sequences may wait, this request has {num_sequences}"
        return Ended(0, EndReason.REJECTED, message=text)
    if 0 < config.max_waiting_tokens < num_tokens:
        text = f"at most {config.max_waiting_tokens} prompt tokens may wait, this request has {num_tokens}"
        return Ended(0, EndReason.REJECTED, message=text)
    waiting, tokens = queue.num_new, queue.num_new_tokens
    if waiting + num_sequences > config.max_waiting:
        text = f"the queue is full: {waiting} of {config.max_waiting} sequences wait"
    elif 0 < config.max_waiting_tokens < tokens + num_tokens:
        text = f"the queue is full: {tokens} of {config.max_waiting_tokens} prompt tokens wait"
    else:
        return None
    return Ended(0, EndReason.QUEUE_FULL, message=text, retry_after_s=drain_rate.retry_after_s(len(queue)))


def sequences_of(
    owner: int, request: Submit, first_number: int, now: float, config: SchedulerConfig, key_row: int
) -> Iterator[Sequence]:
    """The `n` sequences of a request, numbered from `first_number`; `key_row` is its API key's."""
    prompt = np.array(request.prompt, np.int32)
    deadline = now + (request.deadline_ms / 1000 or config.default_deadline_s)
    timeout_s = request.timeout_ms / 1000 or config.request_timeout_s or math.inf
    root = request.salt
    if config.isolate_tenants:
        root = blake2b(root, digest_size=16, key=blake2b(request.tenant.encode()).digest()).digest()
    for index in range(request.n):
        seed = (request.params.seed + index) % (1 << 64)
        yield Sequence(
            owner=owner,
            stream=request.first_stream + index,
            index=index,
            n=request.n,
            request_id=request.request_id,
            model=request.model,
            params=replace(request.params, seed=seed) if index else request.params,
            priority=request.priority,
            rank=request.priority,
            number=first_number + index,
            arrived=now,
            deadline=deadline,
            ends_at=now + timeout_s,
            tokens=prompt,
            prompt_length=len(prompt),
            tenant=request.tenant,
            salt=root,
            retention=Retention(request.retention),
            key_row=key_row,
            call=request.limits.call,
        )
