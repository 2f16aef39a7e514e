"""What a client sees of one stream, checked against the answer that its request alone would have."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from common.wire import Ended, EndReason, FinishCode, ModelCard, SamplingParams
from scheduler_svc.core import WaitReason
from tests.core.model_executor import solo_answer

SERVED = (EndReason.EOS, EndReason.STOP_TOKEN, EndReason.LENGTH)


@dataclass(repr=False, eq=False)
class Stream:
    """What a client has seen of one stream."""

    owner: int
    number: int
    prompt: list[int]
    params: SamplingParams
    accepted: bool = False
    aborted: bool = False
    tokens: list[int] = field(default_factory=list)
    ended: Ended | None = None
    model: ModelCard | None = None
    """The model that said its first token."""
    expected: list[int] = field(default_factory=list)
    code: FinishCode = FinishCode.CONTINUE
    scored: set[int] = field(default_factory=set)
    """Prompt positions whose logprobs have come."""
    waited: dict[WaitReason, float] = field(default_factory=dict)
    """Seconds in the queue, by reason."""
    ends_at: float = math.inf

    def __repr__(self) -> str:
        return f"stream {self.owner}/{self.number}"

    @property
    def over(self) -> bool:
        return self.aborted or self.ended is not None

    def take_token(self, token: int, model: ModelCard) -> None:
        assert self.accepted and not self.over, f"a token for the ended stream {self.number}"
        if self.model is None:
            self.model = model
            self.expected, self.code = solo_answer(model, self.prompt, self.params)
        assert self.model.fingerprint == model.fingerprint, "an answer by two models"
        place = len(self.tokens)
        assert place < len(self.expected) and token == self.expected[place], f"token {place} differs from a run alone"
        self.tokens.append(token)

    def take_end(self, ended: Ended) -> None:
        assert not self.over, f"stream {self.number} ended twice"
        self.ended = ended
        assert 0 <= ended.cached_tokens < len(self.prompt)
        if ended.reason in SERVED:
            assert self.tokens == self.expected, "an answer that is not whole"
            assert ended.reason == self.code
            if self.params.prompt_logprobs >= 0:
                assert self.scored == set(range(1, len(self.prompt))), "prompt logprobs are missing"
        else:
            assert ended.message, "an error needs a text"


def whole(*streams: Stream) -> bool:
    """Whether each was served all of its answer."""
    return all(s.ended is not None and s.ended.reason in SERVED and s.tokens == s.expected for s in streams)


def reason(stream: Stream) -> EndReason | None:
    return None if stream.ended is None else EndReason(stream.ended.reason)
