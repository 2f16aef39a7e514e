"""Takes the result of an iteration into a lane's columns: tokens, computed lengths, and who finished."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.wire import FinishCode, Result
from scheduler_svc.core.iteration import InFlight
from scheduler_svc.core.lane import Lane, LaneError
from scheduler_svc.core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Applied:
    """What one acknowledged iteration brought."""

    slots: NDArray[np.int64]
    """Slots that sampled a token, in the order of the result's tokens."""
    wanted: NDArray[np.bool_] | None
    """Which of them still have a reader; None: all."""
    finished: list[tuple[Sequence, FinishCode]]
    first_tokens: list[Sequence]
    """Sequences that got the first token of their answer."""

    @property
    def wanted_slots(self) -> NDArray[np.int64]:
        """Slots whose token somebody reads."""
        return self.slots if self.wanted is None else self.slots[self.wanted]


def apply_result(lane: Lane, result: Result) -> tuple[InFlight, Applied]:
    """Advance the lane by the acknowledged iteration; finished sequences still hold their slots when this returns.

    Raises `LaneError`, and changes nothing, when the result cannot be the plan's outcome.
    """
    flight = lane.in_flight
    if flight is None or flight.iteration != result.iteration:
        raise LaneError(f"a result of iteration {result.iteration} was not awaited")
    ends = [s for s, chunk in flight.prefills if int(lane.computed[s.slot]) + chunk == int(lane.length[s.slot])]
    slots = flight.decodes
    if ends:
        slots = np.concatenate([slots, np.array([s.slot for s in ends])])
    lengths = lane.length[slots]
    _check(lane, slots, lengths, result)
    lane.in_flight = None
    _advance_prefills(lane, flight, ends)
    lane.tokens[slots, lengths] = result.tokens
    lane.length[slots] = lengths + 1
    lane.computed[slots] = lengths
    first_tokens = [s for s in ends if int(lane.length[s.slot]) == s.prompt_length + 1]
    finished = []
    for row in result.finish.nonzero()[0].tolist():
        sequence = lane.occupant[slots[row]]
        assert sequence is not None
        if not sequence.aborted:
            finished.append((sequence, FinishCode(int(result.finish[row]))))
    wanted = None
    if flight.deferred:
        aborted = np.array([s.slot for s in flight.deferred], np.int64)
        wanted = ~np.isin(slots, aborted)
    return flight, Applied(slots, wanted, finished, [s for s in first_tokens if not s.aborted])


def _check(lane: Lane, slots: NDArray[np.int64], lengths: NDArray[np.int32], result: Result) -> None:
    if len(result.tokens) != len(slots):
        raise LaneError(f"{len(result.tokens)} tokens for {len(slots)} rows")
    for part in result.prompt_logprobs:
        sequence = lane.occupant[part.slot] if part.slot < lane.seats else None
        if sequence is None or sequence.params.prompt_logprobs < 0:
            raise LaneError("prompt logprobs of a row that has none")
        if part.start < 1 or part.start + len(part.widths) > sequence.prompt_length:
            raise LaneError("prompt logprobs outside the prompt")
    if not len(slots):
        return
    # As unsigned numbers the negative ones are the largest.
    if int(result.tokens.view(np.uint32).max()) >= lane.model.vocab_size:
        raise LaneError("a token lies outside the vocabulary")
    full = lengths + 1 >= lane.max_length[slots]
    num_finished = np.count_nonzero(result.finish)
    if num_finished and int(result.finish.max()) > max(FinishCode):
        raise LaneError("an unknown finish code")
    if np.count_nonzero(full & (result.finish == FinishCode.CONTINUE) if num_finished else full):
        raise LaneError("a row went on past its length limit")
    if num_finished and np.count_nonzero(~full & (result.finish == FinishCode.LENGTH)):
        raise LaneError("a row ended before its length limit")
    if num_finished:
        _check_last_tokens(lane, slots, result)


def _check_last_tokens(lane: Lane, slots: NDArray[np.int64], result: Result) -> None:
    """Who ended over a token must have one that ends: else an answer would be cut, and nobody would see it."""
    for row in result.finish.nonzero()[0].tolist():
        sequence = lane.occupant[slots[row]]
        assert sequence is not None
        token, params = int(result.tokens[row]), sequence.params
        match result.finish[row]:
            case FinishCode.EOS if params.ignore_eos or token not in lane.model.eos_ids:
                raise LaneError("a row ended by EOS with a token that is none")
            case FinishCode.STOP_TOKEN if token not in params.stop_token_ids:
                raise LaneError("a row ended by a stop token with another one")


def _advance_prefills(lane: Lane, flight: InFlight, ends: list[Sequence]) -> None:
    for sequence, chunk in flight.prefills:
        lane.computed[sequence.slot] += chunk
        lane.publish(sequence)
    if not ends:
        return
    for sequence in ends:
        sequence.prefilling = False
    lane.prefilling = [sequence for sequence in lane.prefilling if sequence.prefilling]
    lane.decoding = np.concatenate([lane.decoding, np.array([s.slot for s in ends])])
