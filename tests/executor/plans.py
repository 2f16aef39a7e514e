"""Short ways to write plans in tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from common.wire import NewSequence, Plan, SamplingParams


def slots(*values: int) -> np.ndarray[Any, Any]:
    return np.array(values, np.uint16)


def ids(*values: int) -> np.ndarray[Any, Any]:
    return np.array(values, np.int32)


def new_sequence(
    slot: int,
    tokens: list[int] | np.ndarray[Any, Any],
    blocks: list[int],
    *,
    generation: int = 1,
    prompt_length: int | None = None,
    computed: int = 0,
    **params: Any,
) -> NewSequence:
    params.setdefault("max_tokens", 64)
    return NewSequence(
        slot=slot,
        generation=generation,
        tokens=np.array(tokens, np.int32),
        prompt_length=len(tokens) if prompt_length is None else prompt_length,
        computed=computed,
        blocks=np.array(blocks, np.int32),
        params=SamplingParams(**params),
    )


def prefill_plan(iteration: int, *new: NewSequence, epoch: int = 1, **fields: Any) -> Plan:
    """A plan that computes these sequences' uncomputed tokens whole."""
    return Plan(
        epoch=epoch,
        iteration=iteration,
        prefills=slots(*(item.slot for item in new)),
        prefill_lengths=ids(*(len(item.tokens) - item.computed for item in new)),
        new=new,
        **fields,
    )


def decode_plan(iteration: int, *rows: int, epoch: int = 1, **fields: Any) -> Plan:
    return Plan(epoch=epoch, iteration=iteration, decodes=slots(*rows), **fields)
