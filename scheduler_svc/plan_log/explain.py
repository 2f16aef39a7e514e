"""Why a request waited: its story, iteration by iteration, as a table of runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime

from common.wire import Ended, EndReason
from scheduler_svc.core import Scheduler, Sequence, WaitReason
from scheduler_svc.plan_log.format import Header, Kind
from scheduler_svc.plan_log.player import Step

_WITHOUT_LANE = (WaitReason.NO_EXECUTOR, WaitReason.PAUSED)


@dataclass
class Run:
    """Consecutive plans after which a sequence stood alike."""

    state: str
    """`prefill`, `decode`, or the `WaitReason` that kept it out."""
    begun: float
    until: float
    iterations: dict[str, tuple[int, int]] = field(default_factory=dict)
    """First and last iteration by executor."""

    def text(self, arrived: float) -> tuple[str, str, str, str]:
        spans = (f"{name} {a}-{b}" if b > a else f"{name} {a}" for name, (a, b) in self.iterations.items())
        return f"{self.begun - arrived:.3f} s", f"{self.until - arrived:.3f} s", ", ".join(spans) or "-", self.state


@dataclass
class Story:
    """One sequence of the request."""

    name: str
    arrived: float
    wall_time: float
    prompt_tokens: int
    sequence: Sequence | None
    """None: it was refused."""
    from_the_start: bool = True
    """False: the log begins after its arrival."""
    runs: list[Run] = field(default_factory=list)
    ending: str = "the log ends here"

    def note(self, state: str, now: float, executor: str = "", iteration: int | None = None) -> None:
        """How it stands after a plan, or between plans where there is no executor to plan for."""
        if not self.runs:
            self.runs.append(Run(state, self.arrived, now))
        self.runs[-1].until = now
        if self.runs[-1].state != state:
            self.runs.append(Run(state, now, now))
        if iteration is not None:
            first, _ = self.runs[-1].iterations.get(executor, (iteration, iteration))
            self.runs[-1].iterations[executor] = first, iteration

    def text(self) -> Iterator[str]:
        """The story as lines; times are seconds since the arrival."""
        moment = datetime.fromtimestamp(self.wall_time, UTC).isoformat(sep=" ", timespec="milliseconds")
        began = "arrived" if self.from_the_start else "was there when the log began,"
        yield f"{self.name}: {self.prompt_tokens} prompt tokens, {began} {moment}"
        table = [("from", "to", "iterations", ""), *(run.text(self.arrived) for run in self.runs)]
        widths = [max(len(row[column]) for row in table) for column in range(3)]
        for begun, until, spans, state in table if self.runs else []:
            yield f"  {begun:>{widths[0]}}  {until:>{widths[1]}}  {spans:<{widths[2]}}  {state}".rstrip()
        preemptions = self.sequence.num_preemptions if self.sequence is not None else 0
        tokens = self.sequence.num_generated if self.sequence is not None else 0
        yield f"  {self.ending}; {tokens} tokens, preempted {preemptions} times"


class Explainer:
    """Follows the sequences of one request id through the steps of a replay."""

    def __init__(self, request_id: str) -> None:
        # As answers and traces write it, too.
        bare = request_id.removeprefix("chatcmpl-").removeprefix("cmpl-").removeprefix("resp_")
        self._request_id = request_id
        self._ids = {request_id, bare, bare.rsplit("/", 1)[0]}
        self.stories: list[Story] = []
        self._open: dict[tuple[int, int], Story] = {}

    def see(self, step: Step, scheduler: Scheduler, header: Header) -> None:
        """Take in one step; the scheduler is in the state after it."""
        if step.kind is Kind.STATE:
            self._begin(step.now, scheduler, header)
        if step.kind is Kind.SUBMIT:
            self._take_request(step, scheduler, header)
        for key, story in self._open.items():
            sequence = scheduler.live.get(key)
            if sequence is not None:
                _note(story, sequence, step, scheduler)
        for owner, message in step.messages:
            if isinstance(message, Ended):
                text = EndReason(message.reason).name.lower() + (f": {message.message}" if message.message else "")
                self._close((owner, message.stream), text, step.now)
        for key in [key for key in self._open if key not in scheduler.live]:
            self._close(key, "stop string" if step.stopped else "aborted", step.now)

    def text(self) -> Iterator[str]:
        """All stories as lines."""
        for story in self.stories:
            yield from story.text()
        if not self.stories:
            yield f"there is no request {self._request_id!r} in this log"

    def _begin(self, now: float, scheduler: Scheduler, header: Header) -> None:
        """A run begins, maybe in its middle; what is live there has a past that the log does not hold."""
        self._open.clear()
        for key, sequence in scheduler.live.items():
            if sequence.request_id in self._ids:
                self._open_story(key, sequence, now, header, sequence.prompt_length, from_the_start=False)

    def _take_request(self, step: Step, scheduler: Scheduler, header: Header) -> None:
        for request in step.requests:
            if request.request_id not in self._ids:
                continue
            for stream in range(request.first_stream, request.first_stream + request.n):
                key = (step.owner, stream)
                accepted = scheduler.live.get(key) if key not in self._open else None
                self._open_story(key, accepted, step.now, header, len(request.prompt))

    def _open_story(
        self,
        key: tuple[int, int],
        sequence: Sequence | None,
        now: float,
        header: Header,
        prompt_tokens: int,
        *,
        from_the_start: bool = True,
    ) -> None:
        wall_time = header.wall_time + now - header.clock
        story = Story(f"{self._request_id}/{key[1]}", now, wall_time, prompt_tokens, sequence, from_the_start)
        self.stories.append(story)
        self._open[key] = story

    def _close(self, key: tuple[int, int], ending: str, now: float) -> None:
        story = self._open.pop(key, None)
        if story is not None:
            story.ending = f"{now - story.arrived:.3f} s: {ending}"
            if story.runs:
                story.runs[-1].until = now


def _note(story: Story, sequence: Sequence, step: Step, scheduler: Scheduler) -> None:
    reason = scheduler.why(sequence)
    lane = step.lane
    if step.kind not in (Kind.PLAN, Kind.NO_PLAN) or lane is None or sequence.model != lane.model.name:
        if sequence.lane is None and reason in _WITHOUT_LANE:
            story.note(reason.value, step.now)
        return
    if sequence.lane not in (None, lane):
        return
    state = reason.value
    if sequence.lane is lane and reason is WaitReason.NONE:
        state = "prefill" if sequence.prefilling else "decode"
    story.note(state, step.now, lane.name, step.plan.iteration if step.plan is not None else None)
