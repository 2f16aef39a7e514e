"""What a load's answers amount to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.cli.bench.client import Answer

Floats = NDArray[np.float64]
QUANTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True, eq=False)
class Times:
    """Seconds, of answers that are good."""

    ttft: Floats
    """From the request to the first event with tokens, of each answer."""
    itl: Floats
    """Between two such events of an answer."""
    tpot: Floats
    """Of each answer with two tokens or more: from the first event to the last, over the tokens behind the first."""
    e2e: Floats
    """From the request to the end of the stream, of each answer."""

    @classmethod
    def of(cls, good: Sequence[Answer]) -> Self:
        gaps = [np.diff(answer.times) for answer in good]
        return cls(
            ttft=np.array([answer.times[0] - answer.sent for answer in good]),
            itl=np.concatenate(gaps) if gaps else np.empty(0),
            tpot=np.array([(a.times[-1] - a.times[0]) / (a.tokens - 1) for a in good if a.tokens > 1]),
            e2e=np.array([answer.ended - answer.sent for answer in good]),
        )


def good_ones(answers: Sequence[Answer]) -> list[Answer]:
    """Those that count: without an error, and with tokens."""
    return [answer for answer in answers if not answer.error and answer.times]


def figures(answers: Sequence[Answer]) -> dict[str, Any]:
    """As `--json` prints them. Times in milliseconds; rates over the time from the first request to the last answer.

    `errors`: how often each came. Failed requests count nowhere else.
    """
    good = good_ones(answers)
    bad = (answer for answer in answers if answer.error or not answer.times)
    errors = Counter(answer.error or "an answer without tokens" for answer in bad)
    found: dict[str, Any] = {"requests": len(good), "failed": len(answers) - len(good), "errors": dict(errors)}
    if not good:
        return found
    seconds = max(answer.ended for answer in good) - min(answer.sent for answer in good)
    prompt, output = sum(answer.prompt_tokens for answer in good), sum(answer.tokens for answer in good)
    found |= {"seconds": round(seconds, 4), "prompt_tokens": prompt, "output_tokens": output}
    for name, amount in (("requests", len(good)), ("output_tokens", output), ("total_tokens", prompt + output)):
        found[f"{name}_per_s"] = round(amount / max(seconds, 1e-9), 3)
    times = Times.of(good)
    for name in Times.__slots__:
        values = getattr(times, name)
        if len(values):
            found[f"{name}_ms"] = {"mean": round(1000 * float(values.mean()), 3)} | {
                f"p{q}": round(1000 * float(np.percentile(values, q)), 3) for q in QUANTILES
            }
    return found
