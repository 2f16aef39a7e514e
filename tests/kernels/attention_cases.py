"""Batches over a paged cache for the attention tests, and the answer in plain float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kernels import AttentionBatch

Row = tuple[int, int]
"""Tokens in the cache, and how many of them, at the end, are queries of this step."""


@dataclass(frozen=True)
class AttentionCase:
    """keys and values hold each row's contents in order, as the cache does in blocks."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    batch: AttentionBatch
    keys: list[torch.Tensor]
    values: list[torch.Tensor]


def build_case(
    rows: list[Row],
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype = torch.float32,
    *,
    contents: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] | None = None,
    seed: int = 0,
    kv_dtype: torch.dtype | None = None,
    **fields: Any,
) -> AttentionCase:
    """Rows in shuffled blocks; every slot that no row owns is NaN, every unused table entry -1.

    contents: q, keys and values of each row, instead of random ones. kv_dtype: of the cache, when it is not dtype.
    fields: further ones of the batch.
    """
    generator = torch.Generator().manual_seed(seed)
    if contents is None:
        contents = [
            tuple(  # type: ignore[misc]
                torch.randn(tokens, count, head_dim, generator=generator).to(dtype)
                for tokens, count in ((length, heads), (context, kv_heads), (context, kv_heads))
            )
            for context, length in rows
        ]
    if kv_dtype is not None:
        contents = [(q, *(kv.to(kv_dtype).to(dtype) for kv in key_value)) for q, *key_value in contents]  # type: ignore[misc]
    blocks = [-(-context // block_size) for context, _ in rows]
    order = torch.randperm(sum(blocks) + 2, generator=generator)
    k_cache = torch.full((len(order), block_size, kv_heads, head_dim), float("nan"), dtype=dtype)
    v_cache = k_cache.clone()
    tables = torch.full((len(rows), max(blocks) + 1), -1, dtype=torch.int32)
    taken = 0
    for row, (context, _) in enumerate(rows):
        table = order[taken : taken + blocks[row]]
        taken += blocks[row]
        tables[row, : len(table)] = table
        at = torch.arange(context)
        k_cache[table[at // block_size], at % block_size] = contents[row][1]
        v_cache[table[at // block_size], at % block_size] = contents[row][2]
    lengths = torch.tensor([length for _, length in rows])
    decodes = next((index for index, (_, length) in enumerate(rows) if length != 1), len(rows))
    batch = AttentionBatch(
        query_start=torch.cat([torch.zeros(1), lengths.cumsum(0)]).to(torch.int32),
        context_lens=torch.tensor([context for context, _ in rows], dtype=torch.int32),
        block_tables=tables,
        max_query_len=int(lengths.max()),
        max_context_len=max(context for context, _ in rows),
        num_decodes=decodes,
        **fields,
    )
    if kv_dtype is not None:
        k_cache, v_cache = k_cache.to(kv_dtype), v_cache.to(kv_dtype)
    q = torch.cat([row[0] for row in contents])
    return AttentionCase(q, k_cache, v_cache, batch, [row[1] for row in contents], [row[2] for row in contents])


def exact_attention(
    case: AttentionCase, scale: float, window: int = 0, softcap: float = 0.0, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """[T, HQ, D] float64, query by query."""
    heads = case.q.shape[1]
    out = torch.zeros(case.q.shape, dtype=torch.float64)
    starts, contexts = case.batch.query_start.tolist(), case.batch.context_lens.tolist()
    for row, context in enumerate(contexts):
        if context == 0:
            continue
        keys, values = (
            t[row].double().repeat_interleave(heads // t[row].shape[1], dim=1) for t in (case.keys, case.values)
        )
        for token in range(starts[row], starts[row + 1]):
            position = context - starts[row + 1] + token
            first = max(0, position - window + 1) if window else 0
            logits = torch.einsum("hd,khd->hk", case.q[token].double(), keys[first : position + 1]) * scale
            if softcap:
                logits = softcap * torch.tanh(logits / softcap)
            if sinks is not None:
                logits = torch.cat([logits, sinks.double()[:, None]], dim=1)
            weights = logits.softmax(-1)[:, : position + 1 - first]
            out[token] = torch.einsum("hk,khd->hd", weights, values[first : position + 1])
    return out
