"""Paged attention in plain torch: the CPU path, and the reference of the Triton kernels.

Every row is reduced over the same absolute tiles of KEY_TILE keys: per tile a dot product, exp(score - row maximum),
a sum and a product with V; then the tiles are added up in rising order. So a row's result depends on neither its batch
mates, nor how the prompt was cut into chunks, nor the block size, as far as the matrix product of a tile is the same
for every number of rows. MKL promises that with `MKL_CBWR=AVX512,STRICT` (or AVX2,STRICT) in the environment before
torch starts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kernels.attention import AttentionBatch

KEY_TILE = 128
"""Keys reduced at once."""
QUERY_TILE = 128
"""Most query tokens of a prefill chunk worked on at once."""
GATHER_BYTES = 2 << 20
"""fp32 bytes of K or V gathered at once in a decode: what stays in a core's second-level cache."""
SCORE_BYTES = 32 << 20
"""fp32 bytes of scores a prefill holds at once."""


def paged_attention_torch(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
    *,
    window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Same contract as `kernels.paged_attention`; all arithmetic in fp32."""
    block_size, kv_heads = k_cache.shape[1], k_cache.shape[2]
    key = (block_size, window)
    if key not in batch.derived:
        batch.derived[key] = _Tiling.of(batch, block_size, window)
    tiling: _Tiling = batch.derived[key]
    queries = (q.float() * scale).unflatten(1, (kv_heads, -1))  # [T, HK, G, D]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if batch.num_decodes:
        rows = _decode(queries[: batch.num_decodes], k_cache, v_cache, tiling, softcap)
        out[: batch.num_decodes] = rows.view(-1, *q.shape[1:])
    for chunk in tiling.chunks:
        rows = _prefill(queries[chunk.start : chunk.stop], k_cache, v_cache, chunk, window, softcap)
        out[chunk.start : chunk.stop] = rows.view(-1, *q.shape[1:])
    return out


@dataclass(frozen=True)
class _Chunk:
    """One prefill row: its query tokens, the position of the first, and the first tile it sees."""

    start: int
    stop: int
    position: int
    first_tile: int
    units: torch.Tensor


@dataclass(frozen=True)
class _Tiling:
    """What the decode and prefill loops need, derived once a step from the batch.

    Decode work is a list of (row, tile) items, first tiles of all rows first, rows sorted by falling tile count: so the
    items of the t-th tiles are one run of a prefix of the rows.
    """

    order: torch.Tensor  # [B] rows by falling tile count
    item_rows: torch.Tensor  # [items] place in `order`
    rows_of_tile: list[int]  # how many rows have a t-th tile
    units: torch.Tensor  # [items, KEY_TILE / unit] cache units
    masked: torch.Tensor | None  # [items, KEY_TILE] True where the row sees no key; None when all are seen
    hidden: torch.Tensor  # flat positions of what `masked` marks
    chunks: list[_Chunk]

    @classmethod
    def of(cls, batch: AttentionBatch, block_size: int, window: int) -> _Tiling:
        decodes = batch.num_decodes
        context = batch.context_lens[:decodes].long()
        lowest = (context - window).clamp_min(0) if window else torch.zeros_like(context)
        first = lowest // KEY_TILE
        counts = (context + KEY_TILE - 1) // KEY_TILE - first
        counts, order = counts.sort(descending=True, stable=True)
        steps = torch.arange(int(counts[0]) if decodes else 0)
        item_tile, item_rows = (steps[:, None] < counts).nonzero(as_tuple=True)
        rows = order[item_rows]
        begin = (first[rows] + item_tile) * KEY_TILE
        position = begin[:, None] + torch.arange(KEY_TILE)
        masked = (position >= context[rows, None]) | (position < lowest[rows, None])
        hidden = masked.flatten().nonzero().squeeze(1)
        return cls(
            order=order,
            item_rows=item_rows,
            rows_of_tile=(steps[:, None] < counts).sum(1).tolist(),
            units=_cache_units(batch.block_tables[rows], begin, context[rows], block_size),
            masked=masked if hidden.numel() else None,
            hidden=hidden,
            chunks=_chunks(batch, block_size, window),
        )


def _chunks(batch: AttentionBatch, block_size: int, window: int) -> list[_Chunk]:
    starts, contexts = batch.query_start.tolist(), batch.context_lens.tolist()
    chunks = []
    for row in range(batch.num_decodes, len(contexts)):
        start, stop, context = starts[row], starts[row + 1], contexts[row]
        if stop == start:
            continue
        position = context - (stop - start)
        first = max(position - window + 1, 0) // KEY_TILE if window else 0
        begin = torch.arange(first, -(-context // KEY_TILE)) * KEY_TILE
        table = batch.block_tables[row].expand(len(begin), -1)
        units = _cache_units(table, begin, torch.full_like(begin, context), block_size)
        chunks.append(_Chunk(start, stop, position, first, units))
    return chunks


def _cache_units(tables: torch.Tensor, begin: torch.Tensor, context: torch.Tensor, block_size: int) -> torch.Tensor:
    """Where the tiles lie. A unit is the longest run of tokens that divides both a tile and a block.

    tables: [items, MB]; begin: [items] first position of the tile; context: [items]. Returns [items, KEY_TILE / unit]
    indices into the cache seen as [NB * BS / unit, unit, HK, D]; 0 where the unit lies past the context.
    """
    unit = math.gcd(block_size, KEY_TILE)
    position = begin[:, None] + torch.arange(0, KEY_TILE, unit)
    column = (position // block_size).clamp_max(tables.shape[1] - 1)
    index = tables.gather(1, column).long() * (block_size // unit) + position % block_size // unit
    return torch.where(position < context[:, None], index, 0)


def _gather(cache: torch.Tensor, units: torch.Tensor) -> torch.Tensor:
    """[items, KEY_TILE, HK, D] fp32 of the tiles that `units` names."""
    kv_heads, head_dim = cache.shape[2:]
    unit = KEY_TILE // units.shape[1]
    rows = cache.view(-1, unit * kv_heads * head_dim).index_select(0, units.flatten())
    return rows.float().view(-1, KEY_TILE, kv_heads, head_dim)


def _cap(scores: torch.Tensor, softcap: float) -> torch.Tensor:
    return scores.div_(softcap).tanh_().mul_(softcap) if softcap > 0 else scores


def _decode(
    queries: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, tiling: _Tiling, softcap: float
) -> torch.Tensor:
    """queries: [B, HK, G, D] fp32, scaled. Returns [B, HK, G, D] fp32."""
    batch_size, kv_heads, group, head_dim = queries.shape
    items = tiling.item_rows.numel()
    item_queries = queries[tiling.order[tiling.item_rows]].transpose(0, 1).contiguous()  # [HK, items, G, D]
    scores = queries.new_empty(kv_heads, items, group, KEY_TILE)
    step = max(1, GATHER_BYTES // (KEY_TILE * kv_heads * head_dim * 4))
    for begin in range(0, items, step):
        keys = _gather(k_cache, tiling.units[begin : begin + step])
        for head in range(kv_heads):
            part = slice(begin, begin + step)
            torch.bmm(item_queries[head, part], keys[:, :, head].transpose(1, 2), out=scores[head, part])
    _cap(scores, softcap)
    if tiling.masked is not None:
        scores.masked_fill_(tiling.masked[None, :, None], -math.inf)

    runs = _runs(tiling.rows_of_tile)
    highest = scores.amax(-1)  # [HK, items, G]
    row_highest = highest[:, :batch_size].new_full((kv_heads, batch_size, group), -math.inf)
    for count, run in runs:
        torch.maximum(row_highest[:, :count], highest[:, run], out=row_highest[:, :count])
    weights = scores.sub_(row_highest[:, tiling.item_rows, :, None]).exp_()
    sums = weights.sum(-1)
    products = torch.empty_like(item_queries)
    for begin in range(0, items, step):
        values = _gather(v_cache, tiling.units[begin : begin + step])
        _hide(values, tiling.hidden, begin)
        for head in range(kv_heads):
            part = slice(begin, begin + step)
            torch.bmm(weights[head, part], values[:, :, head], out=products[head, part])

    total = queries.new_zeros(kv_heads, batch_size, group, head_dim)
    norm = queries.new_zeros(kv_heads, batch_size, group)
    for count, run in runs:
        total[:, :count] += products[:, run]
        norm[:, :count] += sums[:, run]
    total /= norm.clamp_min(1.0)[..., None]  # a sum is at least exp(0); only padding rows have less
    out = torch.empty_like(queries)
    out[tiling.order] = total.transpose(0, 1)
    return out


def _runs(rows_of_tile: list[int]) -> list[tuple[int, slice]]:
    """For each t: how many rows have a t-th tile, and where its items lie."""
    runs, begin = [], 0
    for count in rows_of_tile:
        runs.append((count, slice(begin, begin + count)))
        begin += count
    return runs


def _hide(values: torch.Tensor, hidden: torch.Tensor, first_item: int) -> None:
    """Zeroes what no row may see, because 0 * NaN is NaN. values: [items, KEY_TILE, HK, D]; hidden: sorted."""
    flat = values.flatten(0, 1).flatten(1)
    low = first_item * KEY_TILE
    bounds = torch.searchsorted(hidden, torch.tensor([low, low + flat.shape[0]]))
    begin, end = bounds.tolist()
    if end > begin:
        flat.index_fill_(0, hidden[begin:end] - low, 0.0)


def _prefill(
    queries: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, chunk: _Chunk, window: int, softcap: float
) -> torch.Tensor:
    """queries: [L, HK, G, D] fp32, scaled, of one row. Returns [L, HK, G, D] fp32."""
    length, kv_heads, group, _ = queries.shape
    context = chunk.position + length
    keys = _gather(k_cache, chunk.units).permute(0, 2, 3, 1)  # [tiles, HK, D, KEY_TILE]
    values = _gather(v_cache, chunk.units)
    values.flatten(0, 1)[context - chunk.first_tile * KEY_TILE :] = 0.0
    values = values.transpose(1, 2)  # [tiles, HK, KEY_TILE, D]
    out = torch.empty_like(queries)
    step = SCORE_BYTES // (kv_heads * group * keys.shape[0] * KEY_TILE * 4)
    step = min(QUERY_TILE, max(1, step))
    for begin in range(0, length, step):
        part = queries[begin : begin + step]
        first = chunk.position + begin
        low = (max(first - window + 1, 0) // KEY_TILE if window else 0) - chunk.first_tile
        high = (first + part.shape[0] - 1) // KEY_TILE + 1 - chunk.first_tile
        offset = (chunk.first_tile + low) * KEY_TILE
        out[begin : begin + step] = _attend(part, keys[low:high], values[low:high], first - offset, window, softcap)
    return out


def _attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, position: int, window: int, softcap: float
) -> torch.Tensor:
    """queries: [L, HK, G, D], the first at `position` of the first tile; keys: [tiles, HK, D, KEY_TILE]."""
    length, kv_heads, group, head_dim = queries.shape
    tiles = keys.shape[0]
    rows = queries.transpose(0, 1).reshape(kv_heads, length * group, head_dim)
    scores = queries.new_empty(tiles, kv_heads, length * group, KEY_TILE)
    for tile in range(tiles):
        torch.bmm(rows, keys[tile], out=scores[tile])
    _cap(scores, softcap)
    at = torch.arange(position, position + length)[:, None]
    key_at = torch.arange(tiles * KEY_TILE).view(tiles, 1, 1, 1, KEY_TILE)
    masked = key_at > at[..., None]
    if window:
        masked |= key_at <= at[..., None] - window
    scores.view(tiles, kv_heads, length, group, KEY_TILE).masked_fill_(masked, -math.inf)

    weights = scores.sub_(scores.amax(-1).amax(0)[..., None]).exp_()
    sums = weights.sum(-1)
    total, norm = torch.zeros_like(rows), torch.zeros_like(sums[0])
    for tile in range(tiles):
        total += torch.bmm(weights[tile], values[tile])
        norm += sums[tile]
    total /= norm[..., None]
    return total.view(kv_heads, length, group, head_dim).transpose(0, 1)
