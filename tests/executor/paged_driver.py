"""Runs a decoder directly: keeps block tables as a scheduler would, in a hostile pool."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from executor_svc.kv_cache import KVCache
from executor_svc.model import Decoder
from kernels import AttentionBatch


@dataclass
class Stream:
    """One sequence: its known tokens, how many of them hold KV, and its blocks."""

    tokens: list[int]
    prompt_length: int
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    """fp32 [vocab] of each sampled position; with `all_logits`, of each position."""

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def decoding(self) -> bool:
        return self.computed >= self.prompt_length


class PagedDriver:
    """Every block is NaN until it is written, blocks are given out in shuffled order, unused table entries point to a
    block of NaN, and rows come in the order decodes, prefills."""

    def __init__(self, decoder: Decoder, block_size: int, capacity: int, seed: int = 0) -> None:
        """capacity: most tokens of all sequences together, each rounded up to whole blocks."""
        self.decoder, self.block_size = decoder, block_size
        num_blocks = capacity // block_size + 2
        shape = (num_blocks, block_size, decoder.config.num_kv_heads, decoder.config.head_dim)
        layers = range(decoder.config.num_layers)
        self.cache = KVCache(
            [torch.full(shape, math.nan, dtype=decoder.dtype) for _ in layers],
            [torch.full(shape, math.nan, dtype=decoder.dtype) for _ in layers],
        )
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()
        self._poison, self._free = order[0], order[1:]

    def step(self, streams: list[Stream], chunk: int, *, all_logits: bool = False) -> None:
        """One iteration: each decoding stream one token, each other one its next `chunk` prompt tokens; greedy."""
        rows = sorted(streams, key=lambda stream: not stream.decoding)
        lengths = [1 if s.decoding else min(chunk, s.prompt_length - s.computed) for s in rows]
        contexts = [s.computed + length for s, length in zip(rows, lengths, strict=True)]
        for stream, context in zip(rows, contexts, strict=True):
            while len(stream.blocks) * self.block_size < context:
                stream.blocks.append(self._free.pop())
        token_ids = [t for s, c in zip(rows, contexts, strict=True) for t in s.tokens[s.computed : c]]
        positions = [p for s, c in zip(rows, contexts, strict=True) for p in range(s.computed, c)]
        slots = [
            s.blocks[p // self.block_size] * self.block_size + p % self.block_size
            for s, c in zip(rows, contexts, strict=True)
            for p in range(s.computed, c)
        ]
        starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        sampling = [c >= s.prompt_length for s, c in zip(rows, contexts, strict=True)]
        ends = (starts[1:].long() - 1)[torch.tensor(sampling, dtype=torch.bool)]
        logit_rows = torch.arange(len(token_ids)) if all_logits else ends
        logits = self.decoder.forward(
            torch.tensor(token_ids),
            torch.tensor(positions),
            torch.tensor(slots),
            self._batch(rows, starts, contexts, lengths),
            self.cache,
            logit_rows,
        )
        for row, (stream, context) in enumerate(zip(rows, contexts, strict=True)):
            stream.computed = context
            if all_logits:
                stream.logits.extend(logits[starts[row] : starts[row + 1]])
            if sampling[row]:
                last = logits[int(starts[row + 1]) - 1] if all_logits else logits[sum(sampling[:row])]
                stream.tokens.append(int(last.argmax()))
                if not all_logits:
                    stream.logits.append(last)

    def _batch(
        self, rows: list[Stream], starts: torch.Tensor, contexts: list[int], lengths: list[int]
    ) -> AttentionBatch:
        width = max(len(stream.blocks) for stream in rows) + 1
        tables = torch.full((len(rows), width), self._poison, dtype=torch.int32)
        for row, stream in enumerate(rows):
            tables[row, : len(stream.blocks)] = torch.tensor(stream.blocks, dtype=torch.int32)
        return AttentionBatch(
            query_start=starts,
            context_lens=torch.tensor(contexts, dtype=torch.int32),
            block_tables=tables,
            max_query_len=max(lengths),
            max_context_len=max(contexts),
            num_decodes=sum(stream.decoding for stream in rows),
        )


def generate(
    decoder: Decoder,
    prompts: list[list[int]],
    new_tokens: int,
    *,
    chunk: int,
    block_size: int,
    all_logits: bool = False,
    seed: int = 0,
) -> list[Stream]:
    """All prompts in one batch: prefilled in chunks, then decoded greedily until each has `new_tokens` more."""
    streams = [Stream(list(prompt), len(prompt)) for prompt in prompts]
    capacity = sum(len(prompt) + new_tokens + block_size for prompt in prompts)
    driver = PagedDriver(decoder, block_size, capacity, seed)
    while unfinished := [s for s in streams if len(s.generated) < new_tokens]:
        driver.step(unfinished, chunk, all_logits=all_logits)
    return streams


def prompt_logits(decoder: Decoder, tokens: list[int], *, chunk: int = 1 << 20, block_size: int = 16) -> torch.Tensor:
    """fp32 [len(tokens), vocab]: the logits of every position of one sequence, prefilled in chunks."""
    (stream,) = generate(decoder, [tokens], 1, chunk=chunk, block_size=block_size, all_logits=True)
    return torch.stack(stream.logits)
