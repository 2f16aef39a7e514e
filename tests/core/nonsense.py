"""Results that cannot follow from a plan."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from common.wire import FinishCode, Result
from scheduler_svc.core import Lane

SPOILS = ["stale", "early", "short", "long", "token", "negative", "code", "on", "off", "eos", "stop"]


def spoil(lane: Lane, result: Result, kind: str) -> Result | None:
    """A result that is wrong in one way; None where it cannot be."""
    tokens, finish = result.tokens.copy(), result.finish.copy()
    match kind:
        case "stale":
            return replace(result, iteration=result.iteration - 1)
        case "early":
            return replace(result, iteration=result.iteration + 1)
        case "short" if len(tokens):
            return replace(result, tokens=tokens[:-1], finish=finish[:-1])
        case "long":
            return replace(result, tokens=np.append(tokens, np.int32(3)), finish=np.append(finish, np.uint8(0)))
        case "token" | "negative" if len(tokens):
            tokens[-1] = lane.model.vocab_size if kind == "token" else -1
            return replace(result, tokens=tokens)
        case "code" if len(tokens):
            finish[0] = 9
            return replace(result, finish=finish)
        case "on" if FinishCode.LENGTH in finish:
            finish[finish == FinishCode.LENGTH] = FinishCode.CONTINUE
            return replace(result, finish=finish)
        case "off" if FinishCode.CONTINUE in finish:
            finish[finish == FinishCode.CONTINUE] = FinishCode.LENGTH
            return replace(result, finish=finish)
        case "eos" | "stop" if FinishCode.CONTINUE in finish:
            row = finish.tolist().index(FinishCode.CONTINUE)
            finish[row] = FinishCode.EOS if kind == "eos" else FinishCode.STOP_TOKEN
            return replace(result, finish=finish)
    return None


def snapshot(lane: Lane) -> tuple[object, ...]:
    columns = (lane.tokens, lane.blocks, lane.length, lane.computed, lane.num_blocks, lane.decoding)
    return (
        lane.in_flight,
        lane.iteration,
        [column.tobytes() for column in columns],
        list(lane.occupant),
        list(lane.free_slots),
        list(lane.prefilling),
        lane.pool.num_available,
        lane.pool.num_cached,
    )
