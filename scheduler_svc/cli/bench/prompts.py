"""Prompts of given lengths, for servers whose vocabulary is not known."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.cli.bench.client import Request
from scheduler_svc.simulator.traces import MOONCAKE_BLOCK
from scheduler_svc.simulator.workload import Workload

LOWEST_ID, HIGHEST_ID = 10, 4000
"""Token ids: every model has them, and they are no special ones."""
_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work number night point home water room mother area money "
    "story fact month lot study book eye job word business issue side kind head house service friend father power "
    "hour game line end member law city name team minute idea body back parent face level office door health person "
    "art war history party result change morning reason research girl guy moment air teacher force education"
)
WORDS = _TEXT.split()
"""Each is one token, or nearly, behind a space in the vocabularies of today."""


def requests(workload: Workload, seed: int, *, as_text: bool) -> list[Request]:
    """One for each of the workload. as_text: words, about as many as there are to be tokens, instead of token ids."""
    made = []
    random = np.random.default_rng(seed)
    for number in range(len(workload)):
        ids = _ids(workload, number, seed, random)
        prompt = " ".join(WORDS[i % len(WORDS)] for i in ids) if as_text else ids
        made.append(Request(prompt, workload.allowed(number)))
    return made


def _ids(workload: Workload, number: int, seed: int, random: np.random.Generator) -> list[int]:
    """Prompts share a prefix exactly where the trace says so."""
    length = int(workload.prompt_lengths[number])
    if workload.prefixes is None:
        return list(map(int, _draw(random, length)))
    pieces = [_draw(np.random.default_rng((seed, int(i))), MOONCAKE_BLOCK) for i in workload.prefixes[number]]
    return list(map(int, np.concatenate(pieces)[:length]))


def _draw(random: np.random.Generator, count: int) -> NDArray[np.int64]:
    return random.integers(LOWEST_ID, HIGHEST_ID, count)
