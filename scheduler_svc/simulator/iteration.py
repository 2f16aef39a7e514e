"""What an iteration's duration depends on."""

from __future__ import annotations

from typing import NamedTuple

FEATURES = ("fixed", "decodes", "prefill_tokens", "decode_context", "prefill_attention", "swapped_blocks")
"""Names of the cost model's features, in the order of `IterationSample.features`."""


class IterationSample(NamedTuple):
    """One iteration's work, and how long it took."""

    decodes: int
    """Rows that compute one token each."""
    prefill_tokens: int
    decode_context: int
    """Sum over the decode rows of the tokens that each attends to, its own among them."""
    prefill_attention: int
    """Sum over the prefill tokens of the tokens that each attends to, its own among them."""
    swapped_blocks: int
    """Blocks moved between device and host, both ways together."""
    seconds: float

    @property
    def features(self) -> tuple[int, ...]:
        """Values in the order of `FEATURES`."""
        return (1, *self[:5])


def chunk_attention(computed: int, chunk: int) -> int:
    """Attention work of a chunk that follows `computed` tokens: the sum of computed + 1 … computed + chunk."""
    return chunk * computed + chunk * (chunk + 1) // 2
