"""Top-k, top-p and min-p on a GPU: the cut-off of each row, by search instead of sorting, unseen by the host.

Tokens are ordered by falling logit / temperature, ties by id, and the first two filters keep a prefix of that order. A
prefix is all tokens above some value, and of those equal to it the ones up to some id. One program a row bisects the
values, as integers in the order of the floats, and counts or weighs the row at each step; it stops once a single token,
or a single value, is left to decide: after 32 steps at most, and half as many as a rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kernels.compiler import tl, triton

if TYPE_CHECKING:
    from kernels.sampling import SamplingColumns


BLOCK = 4096
"""Tokens that a program reads at once."""


@dataclass(frozen=True)
class Cuts:
    """What a row's top-k and top-p keep: keys above `floor`, and of those equal to it the tokens up to `last_token`.

    A key is a float's bits, turned so that as int32 they are ordered like the floats. Rows without filters are not
    looked at: their entries hold nothing of use.
    """

    floor: torch.Tensor
    """int32 [B], a key."""
    last_token: torch.Tensor
    """int32 [B], -1 where no token with that key is kept."""
    highest: torch.Tensor
    """fp32 [B], the largest logit / temperature: min-p counts from there."""


@triton.jit
def order_key(value):
    """int32, ordered like the fp32 values; both zeros have one key."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def is_filtered(temperature, top_k, top_p, min_p, vocab_size):
    """Whether a row is drawn from a part of the vocabulary."""
    return (temperature > 0.0) & (((top_k > 0) & (top_k < vocab_size)) | (top_p < 1.0) | (min_p > 0.0))


@triton.jit
def _scale(row_ptr, temperature, vocab_size, BLOCK: tl.constexpr):
    """Divides a row by the temperature, in place. Returns the largest value."""
    lane = tl.arange(0, BLOCK)
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    divisor = tl.zeros([BLOCK], tl.float32) + temperature
    for start in range(0, vocab_size, BLOCK):
        inside = start + lane < vocab_size
        value = tl.load(row_ptr + start + lane, mask=inside, other=float("-inf"))
        value = tl.div_rn(value, divisor)
        tl.store(row_ptr + start + lane, value, mask=inside)
        highest = tl.maximum(highest, value)
    return tl.max(highest)


@triton.jit
def _above(row_ptr, key, highest, vocab_size, WEIGH: tl.constexpr, BLOCK: tl.constexpr):
    """Of the tokens above a key the number, the fp64 sum of exp(value - highest) if WEIGH, and the least key; of the
    others the largest key."""
    lane = tl.arange(0, BLOCK)
    count = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float64)
    least, largest = tl.full([BLOCK], 2147483647, tl.int32), tl.full([BLOCK], -2147483648, tl.int32)
    for start in range(0, vocab_size, BLOCK):
        inside = start + lane < vocab_size
        value = tl.load(row_ptr + start + lane, mask=inside, other=0.0)
        found = order_key(value)
        above = inside & (found > key)
        count += above.to(tl.int32)
        least = tl.where(above, tl.minimum(least, found), least)
        largest = tl.where(inside & (found <= key), tl.maximum(largest, found), largest)
        if WEIGH:
            mass += tl.where(above, tl.exp(value - highest), 0.0).to(tl.float64)
    return tl.sum(count), tl.sum(mass), tl.min(least), tl.max(largest)


@triton.jit
def _narrow(low, high, middle, enough, least, largest):
    """The half (low, middle] or (middle, high], without the ends that no token has; never empty."""
    return (
        tl.where(enough, tl.minimum(least - 1, high - 1), low),
        tl.where(enough, high, tl.maximum(tl.minimum(largest, middle), low + 1)),
    )


@triton.jit
def _token_of_tie(row_ptr, key, number, vocab_size, BLOCK: tl.constexpr):
    """The id of the token that is the number-th, from 1, with this key."""
    lane = tl.arange(0, BLOCK)
    seen = 0
    found = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab_size, BLOCK):
        inside = start + lane < vocab_size
        value = tl.load(row_ptr + start + lane, mask=inside, other=0.0)
        equal = (inside & (order_key(value) == key)).to(tl.int32)
        rank = seen + tl.cumsum(equal)
        found += tl.where((equal != 0) & (rank == number), start + lane, 0)
        seen += tl.sum(equal)
    return tl.sum(found)


@triton.jit
def _weight_of_key(key, highest):
    """exp(value - highest) of the value with this key, as fp64."""
    bits = key ^ ((key >> 31) & 0x7FFFFFFF)
    return tl.exp(bits.to(tl.float32, bitcast=True) - highest).to(tl.float64)


@triton.jit
def _ties_needed(mass, weight, ties):
    """How many of the tokens of one weight bring a sum of at least `mass`; 1 … ties."""
    needed = tl.ceil(mass / weight)
    return tl.minimum(tl.maximum(needed, 1.0), ties.to(tl.float64)).to(tl.int32)


@triton.jit
def _below_all(key):
    """A key below that of -inf, of the shape of `key`."""
    return key * 0 - 2139095042


@triton.jit
def _middle(low, high):
    """Of two int32 keys, without overflow; low < middle < high where there is one between them."""
    return (low >> 1) + (high >> 1) + (low & high & 1)


@triton.jit
def _cut_top_k(row_ptr, top, top_k, vocab_size, BLOCK: tl.constexpr):
    """(floor, ties): the k first tokens are those above the floor and the first `ties` of those equal to it."""
    low, high = _below_all(top), top  # at least k tokens lie above low, fewer than k above high
    many, few = top * 0 + vocab_size, top * 0
    while (high - 1 > low) & (many != top_k):
        middle = _middle(low, high)
        count, _, least, largest = _above(row_ptr, middle, 0.0, vocab_size, False, BLOCK)
        enough = count >= top_k
        low, high = _narrow(low, high, middle, enough, least, largest)
        many, few = tl.where(enough, count, many), tl.where(enough, few, count)
    exact = many == top_k
    return tl.where(exact, low, high), tl.where(exact, 0, top_k - few)


@triton.jit
def _cut_top_p(row_ptr, top, highest, top_p, floor, ties, vocab_size, BLOCK: tl.constexpr):
    """As `_cut_top_k`, of the set that (floor, ties) names: its shortest prefix that weighs at least top_p of it."""
    many, mass, least, _ = _above(row_ptr, floor, highest, vocab_size, True, BLOCK)
    tie_weight = _weight_of_key(floor, highest)
    wanted = top_p.to(tl.float64) * (mass + tl.where(ties > 0, ties.to(tl.float64) * tie_weight, 0.0))
    if mass < wanted:  # the prefix ends among the ties
        return floor, _ties_needed(wanted - mass, tie_weight, ties)
    low, high = tl.minimum(least, top) - 1, top  # the tokens above low weigh enough, those above high do not
    few, light = top * 0, mass * 0.0
    while (high - 1 > low) & (many - few != 1):
        middle = _middle(low, high)
        count, mass, least, largest = _above(row_ptr, middle, highest, vocab_size, True, BLOCK)
        enough = mass >= wanted
        low, high = _narrow(low, high, middle, enough, least, largest)
        many, few = tl.where(enough, count, many), tl.where(enough, few, count)
        light = tl.where(enough, light, mass)
    equal = many - few
    needed = _ties_needed(wanted - light, _weight_of_key(high, highest), equal)
    whole = (equal == 1) | (needed == equal)
    return tl.where(whole, low, high), tl.where(whole, 0, needed)


@triton.jit
def _filter_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    floor_ptr,
    last_token_ptr,
    highest_ptr,
    row_stride,
    vocab_size,
    BLOCK: tl.constexpr,
):
    """One program a row; ends at once where the row has no filter."""
    row = tl.program_id(0).to(tl.int64)
    temperature, top_k = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row)
    top_p, min_p = tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    if is_filtered(temperature, top_k, top_p, min_p, vocab_size):
        row_ptr = logits_ptr + row * row_stride
        highest = _scale(row_ptr, temperature, vocab_size, BLOCK)
        tl.debug_barrier()  # what one thread has stored, another may load
        top = order_key(highest)
        floor, ties = _below_all(top), top * 0
        if (top_k > 0) & (top_k < vocab_size):
            floor, ties = _cut_top_k(row_ptr, top, top_k, vocab_size, BLOCK)
        if top_p < 1.0:
            floor, ties = _cut_top_p(row_ptr, top, highest, top_p, floor, ties, vocab_size, BLOCK)
        last_token = top * 0 - 1
        if ties > 0:
            last_token = _token_of_tie(row_ptr, floor, ties, vocab_size, BLOCK)
        tl.store(floor_ptr + row, floor)
        tl.store(last_token_ptr + row, last_token)
        tl.store(highest_ptr + row, highest)


def filter_triton(logits: torch.Tensor, columns: SamplingColumns) -> Cuts:
    """Launches `_filter_kernel`. Divides the rows of `logits`, fp32 [B, V], that have a filter by their temperature."""
    rows, vocab_size = logits.shape
    floor = torch.empty(rows, dtype=torch.int32, device=logits.device)
    last_token = torch.empty(rows, dtype=torch.int32, device=logits.device)
    highest = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        _filter_kernel[(rows,)](
            logits,
            columns.temperature,
            columns.top_k,
            columns.top_p,
            columns.min_p,
            floor,
            last_token,
            highest,
            logits.stride(0),
            vocab_size,
            BLOCK=BLOCK,
            num_warps=16,
        )
    return Cuts(floor, last_token, highest)
