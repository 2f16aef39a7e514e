"""What an operator chooses about scheduling."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits and choices; an executor's own limits count too, and the lower one wins."""

    max_num_seqs: int = 256
    """Seats: sequences that run on one lane at a time."""
    max_num_batched_tokens: int = 2048
    """Token budget of one iteration: each decode takes one, prefill chunks the rest."""
    max_prefill_chunk: int = 0
    """Most prompt tokens of one sequence in one iteration; 0: the token budget alone bounds it."""
    long_prefill_threshold: int = 0
    """Prompts with more tokens than this are *long*: one at a time is prefilled, and short ones pass it. 0: a quarter
    of the smallest token budget among the lanes."""
    watermark: float = 0.01
    """Share of a lane's KV blocks that an admission leaves free for the decodes already running."""
    prefix_caching: bool = True
    max_waiting: int = 4096
    """Sequences that may wait; more are refused. Preempted ones do not count."""
    hold_s: float = 30.0
    """Seconds that sequences wait for an executor when their model has none."""
    max_strikes: int = 4
    """A sequence whose plans were lost this often, without progress in between, ends with an error."""

    def long_threshold(self, token_budget: int) -> int:
        return self.long_prefill_threshold or max(1, token_budget // 4)
