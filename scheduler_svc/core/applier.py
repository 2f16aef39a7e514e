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
    """Slots of the rows that sample, in the order of the result's tokens."""
    drawn: NDArray[np.bool_] | None
    """Which of them got a token; None: all."""
    wanted: NDArray[np.bool_] | None
    """Which of them got one and still have a reader; None: all."""
    finished: list[tuple[Sequence, FinishCode]]
    first_tokens: list[Sequence]
    """Sequences that got the first token of their answer."""
    recovered: list[Sequence]
    """Sequences that got their first token since their executor was lost."""

    @property
    def drawn_slots(self) -> NDArray[np.int64]:
        """Slots that have a new token."""
        return self.slots if self.drawn is None else self.slots[self.drawn]

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
    wanted = drawn = _drawn(result)
    tokens, grown = result.tokens, slots
    if drawn is not None:
        ends = [s for s, has_token in zip(ends, drawn[len(flight.decodes) :], strict=True) if has_token]
        tokens, grown, lengths = result.tokens[drawn], slots[drawn], lengths[drawn]
    _advance_prefills(lane, flight, ends)
    lane.tokens[grown, lengths] = tokens
    lane.length[grown] = lengths + 1
    lane.computed[grown] = lengths
    first_tokens = [s for s in ends if int(lane.length[s.slot]) == s.prompt_length + 1]
    if flight.deferred:
        read = ~np.isin(slots, np.array([s.slot for s in flight.deferred], np.int64))
        wanted = read if drawn is None else read & drawn
    finished = _finished(lane, slots, result)
    first_tokens = [s for s in first_tokens if not s.aborted]
    recovered = [s for s in ends if s.lost_at >= 0 and not s.aborted]
    return flight, Applied(slots, drawn, wanted, finished, first_tokens, recovered)


def _drawn(result: Result) -> NDArray[np.bool_] | None:
    """The rows that got a token; None: all."""
    if not np.count_nonzero(result.finish) or int(result.finish.max()) < FinishCode.NOT_READY:
        return None
    return result.finish < FinishCode.NOT_READY


def _finished(lane: Lane, slots: NDArray[np.int64], result: Result) -> list[tuple[Sequence, FinishCode]]:
    """Sequences that have ended, but for those that are wanted no more."""
    finished: list[tuple[Sequence, FinishCode]] = []
    for row in result.finish.nonzero()[0].tolist():
        sequence, code = lane.occupant[slots[row]], FinishCode(int(result.finish[row]))
        assert sequence is not None
        if not sequence.aborted and code is not FinishCode.NOT_READY:
            finished.append((sequence, code))
    return finished


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
            case FinishCode.NOT_READY | FinishCode.STUCK if not params.constraint.bounds:
                raise LaneError("a row without a constraint got no token")
            case FinishCode.STOP_TOKEN if token not in params.stop_token_ids:
                raise LaneError("a row ended by a stop token with another one")


def _advance_prefills(lane: Lane, flight: InFlight, ends: list[Sequence]) -> None:
    """`ends`: those whose answer goes on with a token. One without leaves the last token of its chunk for later."""
    for sequence, chunk in flight.prefills:
        slot = sequence.slot
        reached = int(lane.computed[slot]) + chunk
        waits = reached == int(lane.length[slot]) and sequence not in ends
        lane.computed[slot] = reached - waits
        lane.publish(sequence)
    if not ends:
        return
    for sequence in ends:
        sequence.prefilling = False
    lane.prefilling = [sequence for sequence in lane.prefilling if sequence.prefilling]
    lane.decoding = np.concatenate([lane.decoding, np.array([s.slot for s in ends])])
