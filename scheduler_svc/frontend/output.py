"""What becomes of one sequence's tokens: text to show, logprob entries, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass

from common.wire import Ended, EndReason
from scheduler_svc.frontend.detokenizer import Detokenizer
from scheduler_svc.frontend.parsing.marked_reasoning import ReasoningPlace
from scheduler_svc.frontend.stop_strings import Match, StopAutomaton, StopMatcher
from scheduler_svc.frontend.streams import Scores, Stream

FINISH_REASONS = {EndReason.EOS: "stop", EndReason.STOP_TOKEN: "stop", EndReason.LENGTH: "length"}
"""The normal endings, in OpenAI's words. EOS wins over LENGTH where both are due."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One token with its logprobs. `offset`: characters of the text that stand before it; `shown`: it adds text."""

    token: int
    scores: Scores | None
    offset: int
    shown: bool


class SequenceOutput:
    """Follows one stream. `take` gives the text that may be shown since the last call."""

    def __init__(
        self,
        stream: Stream,
        detokenizer: Detokenizer,
        *,
        ending_ids: frozenset[int],
        stop: StopAutomaton | None,
        include_stop: bool,
        min_tokens: int,
        offset: int,
        keep_ids: bool = False,
        reasoning: ReasoningPlace | None = None,
    ) -> None:
        """`keep_ids`: `take_ids` is wanted. `reasoning`: to be told of each token, before its text is given out."""
        self.stream, self._detokenizer = stream, detokenizer
        self._ending_ids = frozenset() if include_stop else ending_ids
        """Tokens that are not shown if the sequence ends with them."""
        self._matcher = None if stop is None else StopMatcher(stop)
        self._include_stop, self._min_tokens = include_stop, min_tokens
        self._held: tuple[int, Scores | None] | None = None
        """A last token that may turn out to be the ending one."""
        self._length = offset
        self.reasoning = reasoning
        self._plain = self._matcher is None and stream.scores is None and reasoning is None
        self._last_token: int | None = None
        self.num_tokens = 0
        self.cached_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.failure: Ended | None = None
        self.echoed = False
        """The prompt's text has been given out."""
        self.reported = False
        """The finish reason has been given out."""
        self.entries: list[Entry] = []
        """Logprob entries of the tokens worked off."""
        self._ids: list[int] | None = [] if keep_ids else None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def runs_on(self) -> bool:
        """`take` will find tokens and no ending."""
        return self._plain and self.stream.ended is None and bool(self.stream.tokens)

    def take_entries(self) -> list[Entry]:
        """Entries since the last call."""
        entries, self.entries = self.entries, []
        return entries

    def take_ids(self) -> list[int]:
        """Tokens since the last call, as many as `num_tokens` counts."""
        ids, self._ids = self._ids or [], []
        return ids

    def take(self) -> str:
        """Work off what came. Sets `finish_reason` at a normal ending, `failure` at another."""
        stream = self.stream
        if self.finished or self.failure is not None:
            return ""
        ended, tokens, stream.tokens = stream.ended, stream.tokens, []
        text = ""
        if tokens:
            self._last_token = tokens[-1]
            if self._plain:
                text = self._take_plain(tokens)
            else:
                scores = stream.scores
                if scores is not None:
                    stream.scores = []
                text = self._take_each(tokens, scores)
        if ended is not None and not self.finished:
            text += self._end(ended)
        return text

    def _take_plain(self, tokens: list[int]) -> str:
        self.num_tokens += len(tokens)
        if self._ids is not None:
            self._ids += tokens
        if self._held is not None:
            tokens.insert(0, self._held[0])
            self._held = None
        if tokens[-1] in self._ending_ids:
            self._held = (tokens.pop(), None)
        return self._detokenizer.push(tokens)

    def _take_each(self, tokens: list[int], scores: list[Scores | None] | None) -> str:
        text = ""
        for i, token in enumerate(tokens):
            if self._held is not None:
                text += self._add(*self._held)
                self._held = None
                if self.finished:
                    return text
            self.num_tokens += 1
            if self._ids is not None:
                self._ids.append(token)
            entry = None if scores is None else scores[i]
            if token in self._ending_ids:
                self._held = (token, entry)
                continue
            text += self._add(token, entry)
            if self.finished:
                return text
        return text

    def _add(self, token: int, scores: Scores | None) -> str:
        """One token, where each counts."""
        if self.stream.scores is not None:
            self.entries.append(Entry(token, scores, self._length, True))
        text = self._detokenizer.push((token,))
        self._length += len(text)
        if self.reasoning is not None:
            self.reasoning.take(token, self._length)
        if self._matcher is None:
            return text
        enabled = self.num_tokens > self._min_tokens
        found = self._matcher.feed(text, enabled)
        tentative = self._detokenizer.tentative
        if isinstance(found, str) and enabled and tentative and self._matcher.peek(tentative):
            rest = self._matcher.feed(self._detokenizer.finish())
            found = Match(found + rest.text, rest.stop) if isinstance(rest, Match) else found + rest
        return self._stop_at(found) if isinstance(found, Match) else found

    def _stop_at(self, match: Match) -> str:
        self.finish_reason, self.stop_reason = "stop", match.stop
        if self.stream.ended is not None:
            self.cached_tokens = self.stream.ended.cached_tokens
        else:
            self.stream.stop()
        return match.text + match.stop if self._include_stop else match.text

    def _end(self, ended: Ended) -> str:
        self.cached_tokens = ended.cached_tokens
        reason = FINISH_REASONS.get(EndReason(ended.reason))
        if reason is None:
            self.failure = ended
            return ""
        text = self._release_held(hidden=ended.reason != EndReason.LENGTH)
        if self.finished:
            return text
        rest = self._detokenizer.finish()
        if self._matcher is not None:
            found = self._matcher.feed(rest, self.num_tokens > self._min_tokens)
            if isinstance(found, Match):
                return text + self._stop_at(found)
            rest = found + self._matcher.flush()
        self.finish_reason = reason
        if ended.reason == EndReason.STOP_TOKEN:
            self.stop_reason = self._last_token
        return text + rest

    def _release_held(self, *, hidden: bool) -> str:
        """The held token was the ending one, and adds no text, or it was not."""
        if self._held is None:
            return ""
        token, scores = self._held
        self._held = None
        if not hidden:
            return self._detokenizer.push((token,)) if self._plain else self._add(token, scores)
        if self.stream.scores is not None:
            self.entries.append(Entry(token, scores, self._length, False))
        return ""
