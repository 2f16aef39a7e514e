"""Turns an applied iteration into the messages for the frontends."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from common.wire import LogprobColumns, PromptScores, Result, SequenceTimes, Tokens
from scheduler_svc.core.applier import Applied
from scheduler_svc.core.lane import Lane
from scheduler_svc.core.sequence import Sequence


def token_messages(lane: Lane, result: Result, applied: Applied) -> Iterator[tuple[int, Tokens]]:
    """One columnar `Tokens` for each frontend that gets any."""
    rows: NDArray[np.int64] | None = None if applied.wanted is None else np.flatnonzero(applied.wanted)
    slots = applied.slots if rows is None else applied.slots[rows]
    if not len(slots):
        return
    owners = lane.owner[slots]
    first = int(owners[0])
    if rows is None and not np.count_nonzero(owners != first):
        yield first, Tokens(lane.stream[slots], result.tokens, result.logprobs)
        return
    if rows is None:
        rows = np.arange(len(slots))
    for owner in np.unique(owners).tolist():
        chosen = rows[owners == owner]
        logprobs = _select(result.logprobs, chosen) if len(result.logprobs.rows) else result.logprobs
        yield owner, Tokens(lane.stream[applied.slots[chosen]], result.tokens[chosen], logprobs)


def _select(logprobs: LogprobColumns, chosen: NDArray[np.int64]) -> LogprobColumns:
    """The logprobs of the chosen rows, renumbered to their places among them."""
    place = {row: i for i, row in enumerate(chosen.tolist())}
    starts = np.concatenate([[0], np.cumsum(logprobs.widths, dtype=np.int64)])
    kept = [i for i, row in enumerate(logprobs.rows.tolist()) if row in place]
    entries = [np.arange(starts[i], starts[i + 1]) for i in kept]
    index = np.concatenate(entries) if entries else np.empty(0, np.int64)
    return LogprobColumns(
        rows=np.array([place[int(logprobs.rows[i])] for i in kept], np.uint16),
        widths=logprobs.widths[kept],
        token_ids=logprobs.token_ids[index],
        values=logprobs.values[index],
    )


def prompt_scores(lane: Lane, result: Result) -> Iterator[tuple[int, PromptScores]]:
    """Prompt logprobs, by stream; those of sequences that are wanted no more are dropped."""
    for part in result.prompt_logprobs:
        sequence = lane.occupant[part.slot] if part.slot < lane.seats else None
        if sequence is not None and not sequence.aborted:
            yield (
                sequence.owner,
                PromptScores(sequence.stream, part.start, part.widths, part.token_ids, part.values),
            )


def times_of(sequence: Sequence, now: float) -> SequenceTimes:
    """The steps of a sequence that ends now."""
    if sequence.admitted < 0:
        return SequenceTimes(queue_us=_us(now - sequence.arrived))
    first = sequence.first_token_at
    return SequenceTimes(
        queue_us=_us(sequence.admitted - sequence.arrived),
        prefill_us=_us((now if first < 0 else first) - sequence.admitted),
        decode_us=0 if first < 0 else _us(now - first),
        num_preemptions=sequence.num_preemptions,
        num_failovers=sequence.num_failovers,
    )


def _us(seconds: float) -> int:
    return round(1e6 * seconds)
