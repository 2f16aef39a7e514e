"""One generation stream and where it stands."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from common.wire import Retention, SamplingParams

if TYPE_CHECKING:
    from scheduler_svc.core.lane import Lane


class State(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class WaitReason(StrEnum):
    """Why a runnable sequence is not in an iteration. (Texts are quick keys; plain enum members are not.)"""

    NONE = "none"
    SEATS = "seats"
    TOKEN_BUDGET = "token_budget"
    KV_BLOCKS = "kv_blocks"
    POLICY = "policy"
    NO_EXECUTOR = "no_executor"
    PAUSED = "paused"


Key = tuple[int, float, int]
"""Order of service: rank (lower first), the discipline's number, arrival. Victims are taken from the other end."""


@dataclass(frozen=True, slots=True, eq=False)
class SwappedKv:
    """KV of a waiting sequence in the host pool of a lane's executor."""

    lane: Lane
    blocks: list[int]
    computed: int
    """Tokens whose KV they hold."""


@dataclass(slots=True, eq=False)
class Sequence:
    """State that outlives a lane. While it runs, its tokens and block table live in the lane's columns."""

    owner: int
    """The frontend that asked for it."""
    stream: int
    """That frontend's number for it."""
    index: int
    """Which of its request's `n`."""
    request_id: str
    model: str
    params: SamplingParams
    priority: int
    number: int
    """Arrival order over all sequences."""
    arrived: float
    tokens: NDArray[np.int32]
    """Known tokens as of the last time it waited: the prompt, then what was generated."""
    prompt_length: int
    tenant: str = ""
    salt: bytes = b""
    """Root of its hash chain: prefixes are shared among sequences with the same one."""
    retention: Retention = Retention.NORMAL
    key_row: int = 0
    """Its API key's row in `KeyUsage`; 0: none."""
    call: int = 0
    """Its frontend's number for the API call that it belongs to."""
    deadline: float = math.inf
    ends_at: float = math.inf
    """When it ends with an error, unless it is over before."""
    rank: int = 0
    """Its priority class, as lifted by ageing."""
    key: Key = (0, 0.0, 0)
    """As of when it last waited."""
    waited: dict[WaitReason, float] = field(default_factory=dict)
    """Seconds in queues, by reason; the present stay is added when it ends."""
    swapped: SwappedKv | None = None
    num_reached: int = 0
    """Tokens whose KV was computed before it last left a lane."""
    ticket: int = 0
    """Rises with each entry into a queue: tells what a lane has seen waiting before."""
    state: State = State.WAITING
    lane: Lane | None = None
    slot: int = -1
    aborted: bool = False
    """Wanted no more, but an iteration in flight may still write its blocks."""
    prefilling: bool = False
    is_long: bool = False
    """Its prefill is longer than the threshold: others may pass it, see the planner."""
    hashes: list[bytes] = field(default_factory=list)
    """Chained hashes of its full blocks, as far as they were needed."""
    hash_key: bytes = b""
    """What the hashes are chained under; another model's lane starts them anew."""
    fingerprint: bytes = b""
    """The model that wrote its generated tokens; empty while there are none."""
    cached_tokens: int = -1
    """Prompt tokens found in the prefix cache at its first admission; -1 before."""
    admitted: float = -1.0
    last_token_at: float = -1.0
    """When its newest token came; -1 before the first."""
    first_token_at: float = -1.0
    """When the first token of its answer came; -1 before."""
    num_preemptions: int = 0
    num_failovers: int = 0
    """How often its executor was lost while it ran."""
    lost_at: float = -1.0
    """When that was last; -1 as soon as it has a token from another."""
    n: int = 1
    """How many sequences its request has."""
    longest_answer: int = 0
    """Tokens of the longest whole answer of its request that it has to pass on when it ends, its own included."""
    strikes: int = 0
    """Iterations with it that were lost, one after the other, since its last new token."""
    struck_at: int = -1
    """How many tokens it had then."""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) if self.lane is None else int(self.lane.length[self.slot])

    @property
    def num_generated(self) -> int:
        return self.num_tokens - self.prompt_length

    @property
    def is_struck(self) -> bool:
        """Whether it was in a lost iteration and has had no new token since."""
        return self.strikes > 0 and self.num_tokens == self.struck_at

    @property
    def is_suspect(self) -> bool:
        """Whether it may be what breaks executors: it was in two lost iterations and has had no new token since."""
        return self.strikes >= 2 and self.is_struck

    def must_not_run_beside(self, other: Sequence) -> bool:
        """Whether the one could be blamed for what the other does: one is a suspect, the other struck at least once."""
        return (self.is_suspect and other.is_struck) or (self.is_struck and other.is_suspect)

    def strike(self) -> None:
        """Note that an iteration with it was lost. Only a new token shows that it is harmless."""
        self.strikes = self.strikes + 1 if self.num_tokens == self.struck_at else 1
        self.struck_at = self.num_tokens

    @property
    def max_length(self) -> int:
        """Tokens it can have when it ends; the last one needs no KV."""
        return self.prompt_length + self.params.max_tokens
