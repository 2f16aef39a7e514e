"""What happens in a round, as a function of its seed: which requests come, and what is done to the services."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from executor_svc.script import Action

POISON = 4095
"""The token id that makes a prompt deadly. No other prompt holds it."""
BLOCK = 16
"""Tokens in a KV block of the executors."""
TEXTS = (
    "In the beginning",
    "The king said to his servants, and they",
    "Now there was a man",
    "And she answered",
    "They went up into the mountain, and when evening had come they",
    "Listen, my son",
)
STOPS = (["ing"], ["th", "qu"], ["er a"], ["zz", "ou"], ["never to be seen"], ["s", "e the"])


class Kind(StrEnum):
    """What can be done to the services. `victim` is an executor, where nothing else is said."""

    KILL = "kill"
    KILL_ALL = "kill_all"
    """Every executor at once; new ones are started."""
    HOLD = "hold"
    """Every executor, and none is started until the hold time is over."""
    STOP = "stop"
    """SIGSTOP, and SIGCONT after `seconds`."""
    SLOW = "slow"
    """Each iteration takes `seconds`."""
    ACT = "act"
    """The next plan meets `action` of the script."""
    DRAIN = "drain"
    """SIGTERM, once a replacement is there."""
    PAUSE = "pause"
    """Drained by an operator, in `timeout_s` if that is not 0; resumed after `seconds`."""
    STRIKE = "strike"
    """Drained by an operator; after `gap_s` `blow` meets it, or the one that takes over; then resumed."""
    APART = "apart"
    """Only as a blow, and with namespaces: for `seconds` no other executor hears from it."""
    RELEASE = "release"
    """Let go by an operator, once a replacement is there."""
    MODEL = "model"
    """All executors of the model are drained by an operator; resumed after `seconds`."""
    SPARE = "spare"
    """A spare attaches, then all others are killed. It leaves at the end of the round."""
    THIRD = "third"
    """One more executor attaches, and leaves at the end of the round."""
    FRONTEND = "frontend"
    """SIGKILL to a frontend."""
    CUT = "cut"
    """The connections break; for `seconds` no new one stands."""
    CABLE = "cable"
    """Nothing gets through for `seconds`, without a word to either side; then what was sent arrives."""
    HALF = "half"
    """The connections break for the scheduler alone: the executor talks to nobody for `seconds`."""
    DELAY = "delay"
    """Every piece of data takes `seconds` longer."""
    LOSS = "loss"
    """Some pieces of data are lost and sent again, so that they come late."""
    TERM_SCHEDULER = "term_scheduler"
    """SIGTERM to the scheduler; it is started anew."""
    KILL_SCHEDULER = "kill_scheduler"


REAL_KINDS = {
    Kind.KILL: 5, Kind.STOP: 5, Kind.DRAIN: 3, Kind.THIRD: 2, Kind.FRONTEND: 2, Kind.CUT: 3, Kind.CABLE: 3,
    Kind.HALF: 2, Kind.DELAY: 3, Kind.LOSS: 3, Kind.KILL_ALL: 1,
    Kind.PAUSE: 4, Kind.STRIKE: 5, Kind.RELEASE: 2, Kind.MODEL: 2, Kind.SPARE: 1,
}  # fmt: skip
"""What is done to real executors, and how often: those that no script can spoil."""
KINDS = {
    Kind.KILL: 20, Kind.STOP: 14, Kind.SLOW: 8, Kind.ACT: 34, Kind.DRAIN: 7, Kind.THIRD: 6, Kind.FRONTEND: 5,
    Kind.CUT: 9, Kind.CABLE: 8, Kind.HALF: 5, Kind.DELAY: 7, Kind.LOSS: 7, Kind.KILL_ALL: 4,
    Kind.PAUSE: 14, Kind.STRIKE: 20, Kind.RELEASE: 6, Kind.MODEL: 5, Kind.SPARE: 4,
}  # fmt: skip
BLOWS = (Kind.KILL, Kind.STOP, Kind.APART)
ACTIONS = (
    (Action.FAULT,) * 5 + (Action.DIE_BEFORE,) * 2 + (Action.DIE_AFTER,) * 2 + (Action.HANG, Action.SILENCE)
    + (Action.JUNK, Action.DOUBLE, Action.WRONG_EPOCH, Action.SHORT, Action.EXTRA, Action.STALE, Action.BAD_FINISH,
       Action.BAD_TOKEN) * 3
)  # fmt: skip


@dataclass(frozen=True)
class Ask:
    """One request."""

    number: int
    path: str
    body: dict[str, Any]
    begin_s: float
    leave_s: float | None = None
    """The client closes its connection so long after it began; None: it stays."""
    pause_s: float = 0.0
    """A slow reader waits so long between two small reads."""
    poisoned: bool = False

    @property
    def streams(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def is_single(self) -> bool:
        """Whether it asks for one sequence."""
        prompt = self.body.get("prompt")
        return self.body.get("n", 1) == 1 and not (isinstance(prompt, list) and isinstance(prompt[0], str))

    @property
    def plain_body(self) -> dict[str, Any]:
        """The same, to be answered at once."""
        return {name: value for name, value in self.body.items() if name not in ("stream", "stream_options")}


@dataclass(frozen=True)
class Disturbance:
    at_s: float
    kind: Kind
    victim: int = 0
    """Which one, counted in the order of age, modulo how many there are."""
    seconds: float = 0.0
    action: Action | None = None
    timeout_s: float = 0.0
    gap_s: float = 0.0
    blow: Kind | None = None
    at_target: bool = False
    """The blow meets another executor than the one that is drained."""


@dataclass(frozen=True)
class Round:
    seed: int
    asks: tuple[Ask, ...]
    disturbances: tuple[Disturbance, ...]
    poison_action: Action = Action.FAULT
    name_poisoned: bool = True

    @property
    def is_measured(self) -> bool:
        """Whether a kill is all that happens, so that the time to recover says something."""
        return [deed.kind for deed in self.disturbances] == [Kind.KILL]


def plan_round(seed: int, *, real: bool = False) -> Round:
    """The round of a seed. `real`: for executors that run a model, which take no script and start slowly."""
    draw = random.Random(seed)
    disturbances = _disturbances(draw, real)
    base = [draw.randrange(6, POISON) for _ in range(int(3.5 * BLOCK))]
    is_measured = [deed.kind for deed in disturbances] == [Kind.KILL]
    # Where the time to recover is measured, one executor has seats for all.
    asks = [_ask(draw, number, base) for number in range(6 if is_measured else draw.randint(5, 12))]
    asks = [ask for ask in asks if ask.is_single or not is_measured]
    if not real and not is_measured and draw.random() < 0.05:
        asks.append(_poisoned(draw, len(asks)))
    return Round(
        seed=seed,
        asks=tuple(asks),
        disturbances=disturbances,
        poison_action=Action.DIE_BEFORE if draw.random() < 0.2 else Action.FAULT,
        name_poisoned=draw.random() < 0.5,
    )


def _disturbances(draw: random.Random, real: bool) -> tuple[Disturbance, ...]:
    rare = draw.random()
    if rare < 0.005:
        return (Disturbance(0.15, Kind.HOLD),)
    if rare < 0.015:
        kind = Kind.TERM_SCHEDULER if rare < 0.01 else Kind.KILL_SCHEDULER
        return (Disturbance(draw.uniform(0.05, 0.5), kind),)
    if rare < 0.15:
        return (_disturbance(draw, Kind.KILL),)
    weights = REAL_KINDS if real else KINDS
    count = draw.choice((0, 1, 1, 1, 1, 2, 2, 3))
    kinds = draw.choices(list(weights), list(weights.values()), k=count)
    return tuple(sorted((_disturbance(draw, kind) for kind in kinds), key=lambda d: d.at_s))


def _disturbance(draw: random.Random, kind: Kind) -> Disturbance:
    seconds = 0.0
    match kind:
        case Kind.STOP | Kind.CABLE | Kind.STRIKE:
            seconds = draw.choice((0.1, 0.3, 1.8))
        case Kind.PAUSE | Kind.MODEL:
            seconds = draw.choice((0.0, 0.1, 0.3, 0.8))
        case Kind.CUT | Kind.HALF:
            seconds = draw.uniform(0.05, 0.5)
        case Kind.SLOW:
            seconds = draw.choice((0.03, 0.1))
        case Kind.DELAY:
            seconds = draw.choice((0.005, 0.03, 0.1))
        case Kind.LOSS:
            seconds = draw.uniform(0.3, 0.8)
    action = draw.choice(ACTIONS) if kind is Kind.ACT else None
    deed = Disturbance(draw.uniform(0.05, 0.5), kind, draw.randrange(64), seconds, action)
    if kind is Kind.PAUSE:
        return replace(deed, timeout_s=draw.choice((0.0, 0.001, 0.05, 0.3)))
    if kind is Kind.STRIKE:
        return replace(deed, gap_s=draw.uniform(0.0, 0.06), blow=draw.choice(BLOWS), at_target=draw.random() < 0.5)
    return deed


def _ask(draw: random.Random, number: int, base: list[int]) -> Ask:
    is_chat = draw.random() < 0.15
    body: dict[str, Any] = {"max_tokens": draw.randint(1, 110)}
    if is_chat:
        body["messages"] = [{"role": "user", "content": draw.choice(TEXTS)}]
    else:
        body["prompt"] = _prompt(draw, base)
    if draw.random() < 0.7:
        body["stream"] = True
        if draw.random() < 0.3:
            body["stream_options"] = {"include_usage": True}
    _add_sampling(draw, body)
    _add_logprobs(draw, body, is_chat)
    leaves = draw.random() < 0.15
    return Ask(
        number=number,
        path="/v1/chat/completions" if is_chat else "/v1/completions",
        body=body,
        begin_s=draw.choice((0.0, draw.uniform(0, 0.4))),
        leave_s=draw.uniform(0.01, 0.5) if leaves else None,
        pause_s=draw.choice((0.002, 0.01)) if draw.random() < 0.1 else 0.0,
    )


def _prompt(draw: random.Random, base: list[int]) -> Any:
    """Text, own ids, or ids that begin as those of others."""
    kind = draw.random()
    if kind < 0.2:
        return draw.choice(TEXTS)
    if kind < 0.3:
        return draw.sample(TEXTS, 2)
    own = [draw.randrange(6, POISON) for _ in range(draw.choice((1, 5, BLOCK, 40, 90)))]
    return [*base[: draw.choice((BLOCK, 2 * BLOCK, len(base)))], *own] if kind < 0.7 else own


def _add_sampling(draw: random.Random, body: dict[str, Any]) -> None:
    if draw.random() < 0.5:
        body["temperature"] = 0
    else:
        body |= {"temperature": draw.choice((0.5, 1.0)), "seed": draw.randrange(1 << 32)}
        body |= draw.choice(({}, {"top_p": 0.9}, {"top_k": 40, "min_p": 0.01}))
    if draw.random() < 0.3:
        body["n"] = draw.randint(2, 3)
    if draw.random() < 0.2:
        body |= draw.choice(
            (
                {"presence_penalty": 0.5},
                {"frequency_penalty": 1.0},
                {"repetition_penalty": 1.2},
                {"logit_bias": {"300": 5}},
            )
        )
    if draw.random() < 0.2:
        body["stop"] = draw.choice(STOPS)
    if draw.random() < 0.5:
        body["ignore_eos"] = True


def _add_logprobs(draw: random.Random, body: dict[str, Any], is_chat: bool) -> None:
    if draw.random() >= 0.15:
        return
    if is_chat:
        body |= {"logprobs": True, "top_logprobs": draw.randint(0, 3)}
    else:
        body |= {"logprobs": draw.randint(0, 3), "echo": draw.random() < 0.3}


def _poisoned(draw: random.Random, number: int) -> Ask:
    prompt = [draw.randrange(6, POISON) for _ in range(20)] + [POISON]
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": 30, "temperature": 0, "ignore_eos": True}
    if draw.random() < 0.5:
        body["stream"] = True
    return Ask(number, "/v1/completions", body, begin_s=draw.uniform(0, 0.3), poisoned=True)
