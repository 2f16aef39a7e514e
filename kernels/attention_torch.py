"""Paged attention in plain torch: the CPU path, and the reference of the Triton kernels.

Every row is reduced over the same absolute tiles of KEY_TILE keys: per tile a dot product, exp(score - row maximum),
a sum and a product with V; then the tiles are added up in rising order. So a row's result depends on neither its batch
mates, nor how the prompt was cut into chunks, nor the block size, as far as the matrix product of a tile is the same
for every number of rows. MKL promises that with `MKL_CBWR=AVX512,STRICT` (or AVX2,STRICT) in the environment before
torch starts. Elsewhere (it has no strict mode on AMD) rows are multiplied `ROW_TILE` at a time, which is slower.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kernels.float8 import as_bytes
from kernels.linear import strict_mode

if TYPE_CHECKING:
    from kernels.attention import AttentionBatch

ROW_TILE = 0 if strict_mode() else 4
"""Query rows in one matrix product; 0: as many as there are."""
KEY_TILE = 128
"""Keys reduced at once."""
QUERY_TILE = 128
"""Most query tokens of a prefill chunk worked on at once."""
GATHER_BYTES = 1 << 20
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
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Same contract as `kernels.paged_attention`; all arithmetic in fp32."""
    block_size, kv_heads = k_cache.shape[1], k_cache.shape[2]
    key = (block_size, kv_heads, window)
    if key not in batch.derived:
        batch.derived[key] = _Tiling.of(batch, *key)
    tiling: _Tiling = batch.derived[key]
    scratch: _Scratch = batch.derived.setdefault("scratch", _Scratch())
    tokens, heads, head_dim = q.shape
    queries = (q.float() * scale).view(tokens, kv_heads, heads // kv_heads, head_dim)
    head_sinks = None if sinks is None else sinks.float().view(kv_heads, -1)
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    if batch.num_decodes:
        rows = _decode(queries[: batch.num_decodes], k_cache, v_cache, tiling, softcap, head_sinks, scratch)
        out[: batch.num_decodes] = rows.view(-1, *q.shape[1:])
    for chunk in tiling.chunks:
        part = queries[chunk.start : chunk.stop]
        rows = _prefill(part, k_cache, v_cache, chunk, window, softcap, head_sinks, scratch)
        out[chunk.start : chunk.stop] = rows.view(-1, *q.shape[1:])
    return out


class _Scratch:
    """Buffers kept for all layers of a step: fresh pages cost more than the arithmetic done in them."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """An uninitialised tensor; the same memory as the last one taken under this name."""
        size = math.prod(shape)
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name, dtype] = torch.empty(size, dtype=dtype)
        return buffer[:size].view(shape)


@dataclass(frozen=True)
class _Chunk:
    """One prefill row: its query tokens, the position of the first, the first tile it sees, and the cache slots of the
    tiles' keys (where no query sees one: of a key that some query does see)."""

    start: int
    stop: int
    position: int
    first_tile: int
    slots: torch.Tensor


@dataclass(frozen=True)
class _Tiling:
    """What the decode and prefill loops need, derived once a step from the batch.

    Decode work is a list of (row, tile) items, first tiles of all rows first, rows sorted by falling tile count: so the
    items of the t-th tiles are one run of a prefix of the rows. Where a tile holds a key that the row does not see, a
    key that it does see is read instead and its score masked: so nothing of an unused slot is ever touched.
    """

    order: torch.Tensor  # [B] rows by falling tile count
    item_rows: torch.Tensor  # [items] place in `order`
    rows_of_tile: list[int]  # how many rows have a t-th tile
    head_rows: torch.Tensor  # [items * HK * KEY_TILE] rows of the cache seen as [NB * BS * HK, D]
    masked: torch.Tensor | None  # [items, 1, 1, KEY_TILE] True where the row sees no key; None when all are seen
    chunks: list[_Chunk]

    @classmethod
    def of(cls, batch: AttentionBatch, block_size: int, kv_heads: int, window: int) -> _Tiling:
        decodes = batch.num_decodes
        context = batch.context_lens[:decodes].long()
        lowest = (context - window).clamp_min(0) if window else torch.zeros_like(context)
        first = lowest // KEY_TILE
        counts = (context + KEY_TILE - 1) // KEY_TILE - first
        counts, order = counts.sort(descending=True, stable=True)
        steps = torch.arange(int(counts[0]) if decodes else 0)
        item_tile, item_rows = (steps[:, None] < counts).nonzero(as_tuple=True)
        rows = order[item_rows]
        position = (first[rows] + item_tile)[:, None] * KEY_TILE + torch.arange(KEY_TILE)
        seen = torch.minimum(torch.maximum(position, lowest[rows, None]), context[rows, None] - 1)
        masked = position != seen
        slots = _slots(batch.block_tables[rows], seen, block_size)
        return cls(
            order=order,
            item_rows=item_rows,
            rows_of_tile=(steps[:, None] < counts).sum(1).tolist(),
            head_rows=(slots[:, None] * kv_heads + torch.arange(kv_heads)[:, None]).view(-1),
            masked=masked[:, None, None] if bool(masked.any()) else None,
            chunks=_chunks(batch, block_size, window),
        )


def _chunks(batch: AttentionBatch, block_size: int, window: int) -> list[_Chunk]:
    starts, contexts = batch.query_start.tolist(), batch.context_lens.tolist()
    chunks = []
    for row in range(batch.num_decodes, len(contexts)):
        start, stop, context = starts[row], starts[row + 1], contexts[row]
        if stop == start or context == 0:
            continue
        start_position = context - (stop - start)
        lowest = max(start_position - window + 1, 0) if window else 0
        first = lowest // KEY_TILE
        position = torch.arange(first * KEY_TILE, -(-context // KEY_TILE) * KEY_TILE).clamp(lowest, context - 1)
        slots = _slots(batch.block_tables[row : row + 1], position[None], block_size).view(-1)
        chunks.append(_Chunk(start, stop, start_position, first, slots))
    return chunks


def _slots(tables: torch.Tensor, positions: torch.Tensor, block_size: int) -> torch.Tensor:
    """Flat cache slots, int64 [N, L], of `positions` [N, L] in the rows whose block tables are `tables` [N, MB]."""
    return tables.gather(1, positions // block_size).long() * block_size + positions % block_size


def _gather(cache: torch.Tensor, rows: torch.Tensor, width: int, scratch: _Scratch, name: str) -> torch.Tensor:
    """fp32 [N, width]: the `rows`, int64 [N], of the cache seen as [.., width]. Valid until the next use of `name`."""
    found = scratch.take(name, (rows.numel(), width), cache.dtype)
    torch.index_select(as_bytes(cache).view(-1, width), 0, rows, out=as_bytes(found))
    if cache.dtype == torch.float32:
        return found
    return scratch.take(name, found.shape).copy_(found)


def _cap(scores: torch.Tensor, softcap: float) -> torch.Tensor:
    return scores.div_(softcap).tanh_().mul_(softcap) if softcap > 0 else scores


def _whole_tiles(rows: torch.Tensor) -> torch.Tensor:
    """[N, M, D] with rows of zeros, so that M is a multiple of `ROW_TILE`, and at least two: MKL multiplies one row by
    another routine, which rounds differently."""
    count = rows.shape[1]
    missing = -count % ROW_TILE if ROW_TILE else int(count == 1)
    return torch.nn.functional.pad(rows, (0, 0, 0, missing)) if missing else rows


def _bmm(rows: torch.Tensor, matrices: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """out[N, M, L] = rows[N, M, K] matrices[N, K, L], each row by the same routine whatever M is."""
    if not ROW_TILE or rows.shape[1] <= ROW_TILE:
        return torch.bmm(rows, matrices, out=out)
    for part, target in zip(torch.split(rows, ROW_TILE, 1), torch.split(out, ROW_TILE, 1), strict=True):
        target.copy_(torch.bmm(part.contiguous(), matrices))
    return out


def _decode(
    queries: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    tiling: _Tiling,
    softcap: float,
    sinks: torch.Tensor | None,
    scratch: _Scratch,
) -> torch.Tensor:
    """queries: [B, HK, G, D] fp32, scaled; sinks: [HK, G] fp32. Returns [B, HK, G, D] fp32."""
    batch_size, kv_heads, _, head_dim = queries.shape
    items = tiling.item_rows.numel()
    item_queries = _whole_tiles(queries[tiling.order[tiling.item_rows]].flatten(0, 1))  # [items * HK, G, D]
    group = item_queries.shape[1]
    scores = scratch.take("scores", (items * kv_heads, group, KEY_TILE))
    pairs = max(1, GATHER_BYTES // (KEY_TILE * head_dim * 4))  # of an item and a KV head, gathered at once
    for begin in range(0, len(scores), pairs):
        part = slice(begin, begin + pairs)
        rows = tiling.head_rows[begin * KEY_TILE : (begin + pairs) * KEY_TILE]
        keys = _gather(k_cache, rows, head_dim, scratch, "gathered").view(-1, KEY_TILE, head_dim)
        _bmm(item_queries[part], keys.transpose(1, 2), scores[part])
    _cap(scores, softcap)
    scores = scores.view(items, kv_heads, group, KEY_TILE)
    if tiling.masked is not None:
        scores.masked_fill_(tiling.masked, -math.inf)

    runs = _runs(tiling.rows_of_tile)
    highest = scores.amax(-1)  # [items, HK, G]
    row_highest = queries.new_full((batch_size, kv_heads, group), -math.inf)
    if sinks is not None:
        row_highest[:, :, : sinks.shape[1]] = sinks
    for count, run in runs:
        torch.maximum(row_highest[:count], highest[run], out=row_highest[:count])
    weights = scores.sub_(row_highest[tiling.item_rows, :, :, None]).exp_()
    sums = weights.sum(-1)
    weights = weights.flatten(0, 1)
    products = torch.empty_like(item_queries)
    for begin in range(0, len(products), pairs):
        part = slice(begin, begin + pairs)
        rows = tiling.head_rows[begin * KEY_TILE : (begin + pairs) * KEY_TILE]
        values = _gather(v_cache, rows, head_dim, scratch, "gathered").view(-1, KEY_TILE, head_dim)
        _bmm(weights[part], values, products[part])

    products = products.view(items, kv_heads, group, head_dim)
    total = queries.new_zeros(batch_size, kv_heads, group, head_dim)
    norm = queries.new_zeros(row_highest.shape)
    if sinks is not None:
        norm[:, :, : sinks.shape[1]] = (sinks - row_highest[:, :, : sinks.shape[1]]).exp_()
    for count, run in runs:
        total[:count] += products[run]
        norm[:count] += sums[run]
    total /= norm.clamp_min_(1.0)[..., None]  # a sum is at least exp(0); only padding rows have less
    return torch.empty_like(queries).index_copy_(0, tiling.order, total[:, :, : queries.shape[2]])


def _runs(rows_of_tile: list[int]) -> list[tuple[int, slice]]:
    """For each t: how many rows have a t-th tile, and where its items lie."""
    runs, begin = [], 0
    for count in rows_of_tile:
        runs.append((count, slice(begin, begin + count)))
        begin += count
    return runs


def _prefill(
    queries: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    chunk: _Chunk,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
    scratch: _Scratch,
) -> torch.Tensor:
    """queries: [L, HK, G, D] fp32, scaled, of one row; sinks: [HK, G] fp32. Returns [L, HK, G, D] fp32."""
    length, kv_heads, group, head_dim = queries.shape
    tiled = (-1, KEY_TILE, kv_heads, head_dim)
    keys = _gather(k_cache, chunk.slots, kv_heads * head_dim, scratch, "keys").view(tiled)
    keys = keys.permute(0, 2, 3, 1)  # [tiles, HK, D, KEY_TILE]
    values = _gather(v_cache, chunk.slots, kv_heads * head_dim, scratch, "values").view(tiled).transpose(1, 2)
    out = torch.empty_like(queries)
    step = SCORE_BYTES // (kv_heads * group * keys.shape[0] * KEY_TILE * 4)
    step = min(QUERY_TILE, max(1, step))
    for begin in range(0, length, step):
        part = queries[begin : begin + step]
        first = chunk.position + begin
        low = (max(first - window + 1, 0) // KEY_TILE if window else 0) - chunk.first_tile
        high = (first + part.shape[0] - 1) // KEY_TILE + 1 - chunk.first_tile
        offset = (chunk.first_tile + low) * KEY_TILE
        out[begin : begin + step] = _attend(
            part, keys[low:high], values[low:high], first - offset, window, softcap, sinks, scratch
        )
    return out


def _attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    position: int,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
    scratch: _Scratch,
) -> torch.Tensor:
    """queries: [L, HK, G, D], the first at `position` of the first tile; keys: [tiles, HK, D, KEY_TILE];
    values: [tiles, HK, KEY_TILE, D]. Returns [L, HK, G, D]."""
    length, kv_heads, group, head_dim = queries.shape
    tiles = keys.shape[0]
    rows = _whole_tiles(queries.transpose(0, 1).reshape(kv_heads, length * group, head_dim))
    scores = scratch.take("scores", (tiles, kv_heads, rows.shape[1], KEY_TILE))
    for tile in range(tiles):
        _bmm(rows, keys[tile], scores[tile])
    _cap(scores, softcap)
    at = (position + torch.arange(rows.shape[1]) // group)[:, None]
    key_at = torch.arange(tiles * KEY_TILE).view(tiles, 1, 1, KEY_TILE)
    masked = key_at > at
    if window:
        masked |= key_at <= at - window
    scores.masked_fill_(masked, -math.inf)

    highest = scores.amax(-1).amax(0)
    norm = torch.zeros_like(highest)
    if sinks is not None:
        sink = torch.nn.functional.pad(sinks.repeat(1, length), (0, rows.shape[1] - length * group))
        torch.maximum(highest, sink, out=highest)
        norm = (sink - highest).exp_()
    weights = scores.sub_(highest[..., None]).exp_()
    sums = weights.sum(-1)
    total = torch.zeros_like(rows)
    for tile in range(tiles):
        total += _bmm(weights[tile], values[tile], torch.empty_like(rows))
        norm += sums[tile]
    total /= norm[..., None]
    return total[:, : length * group].view(kv_heads, length, group, head_dim).transpose(0, 1)
