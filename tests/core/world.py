"""The core with model executors and clients around it: drives them, and checks what a client and an executor see."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from common.wire import (
    Ended,
    EndReason,
    KeyLimits,
    Limits,
    ModelCard,
    Plan,
    PromptScores,
    Result,
    Retention,
    SamplingParams,
    Submit,
    SubmitCall,
    Tokens,
    TransferPoint,
    decode,
    encode,
)
from scheduler_svc.core import Lane, Scheduler, SchedulerConfig, Sequence, State, WaitReason
from scheduler_svc.core.config import Admission, Prefill
from tests.core.checks import check_full, check_mirror, check_reasons, check_seated, check_tokens, check_waited
from tests.core.fetches import Fetches
from tests.core.model_executor import ModelExecutor, card
from tests.core.stream import Stream
from tests.core.totals import totals


@dataclass
class Outing:
    """A plan that an executor has; its result may be delivered, or be lost."""

    plan: Plan
    result: Result
    available_blocks: int
    free_slots: list[int]


class World:
    """One scheduler. Time stands still unless `now` is moved. Admission is immediate unless another is asked for: what
    happens when blocks run out would else be rare."""

    def __init__(self, config: SchedulerConfig | None = None, **changes: Any) -> None:
        self.config = config or SchedulerConfig(**{"admission": Admission.IMMEDIATE, **changes})
        self.scheduler = Scheduler(self.config)
        self._now = 100.0
        self.executors: dict[int, ModelExecutor] = {}
        self.out: dict[int, Outing] = {}
        self.streams: dict[tuple[int, int], Stream] = {}
        self.plans: list[Plan] = []
        self.prefills_before: dict[int, int] = {}
        """By epoch: iterations of prefill alone before the newest plan."""
        self.closed: set[int] = set()
        """Epochs whose lanes held members of a batch before the plan in flight."""
        self.open: set[tuple[int, int]] = set()
        """Streams that may still be live."""
        self.waited = dict.fromkeys(WaitReason, 0.0)
        """Seconds of all streams in queues, by reason."""
        self.num_checks = 0
        self.leaving: set[int] = set()
        """Epochs of lanes that are to be drained at their next plan."""
        self.fetches = Fetches(self)
        self._num_streams = 0

    @property
    def now(self) -> float:
        return self._now

    @now.setter
    def now(self, now: float) -> None:
        """Time passes, for each that waits by its reason."""
        passed, self._now = now - self._now, now
        for key, sequence in self.scheduler.live.items():
            if sequence.state is State.WAITING:
                waited, reason = self.streams[key].waited, self.scheduler.why(sequence)
                waited[reason] = waited.get(reason, 0.0) + passed
                self.waited[reason] += passed

    # --- clients ---

    def submit(self, prompt: list[int] | int, max_tokens: int = 8, *, owner: int = 0, **rest: Any) -> list[Stream]:
        """Submit a request, a call of its own unless `limits` name one; a number as prompt: so many made-up tokens."""
        request, streams = self._request(prompt, max_tokens, owner, **rest)
        self._submit(owner, request, streams)
        return streams

    def submit_call(self, prompts: list[int], max_tokens: int = 8, *, owner: int = 0, **rest: Any) -> list[Stream]:
        """Submit requests with made-up prompts of these lengths as one call."""
        if "limits" in rest:
            rest["limits"] = replace(rest["limits"], call=self._num_streams + 1)
        parts = [self._request(prompt, max_tokens, owner, **rest) for prompt in prompts]
        streams = [stream for _, part in parts for stream in part]
        self._submit(owner, SubmitCall(tuple(request for request, _ in parts)), streams)
        return streams

    def _request(
        self,
        prompt: list[int] | int,
        max_tokens: int,
        owner: int,
        *,
        n: int = 1,
        priority: int = 0,
        tenant: str = "",
        salt: bytes = b"",
        retention: Retention = Retention.NORMAL,
        deadline_ms: int = 0,
        timeout_ms: int = 0,
        limits: KeyLimits | None = None,
        **params: Any,
    ) -> tuple[Submit, list[Stream]]:
        model = params.pop("model", "m")
        first = self._num_streams
        self._num_streams += n
        if isinstance(prompt, int):
            prompt = [2 + (first * 7 + i * i + i // 3) % 38 for i in range(prompt)]
        sampling = SamplingParams(max_tokens, **{"temperature": 0.0, **params})
        tokens = np.array(prompt, np.int32)
        placing = (priority, tenant, salt, retention, deadline_ms, timeout_ms)
        request = Submit(first, n, f"r{first}", model, tokens, sampling, *placing)
        timeout_s = timeout_ms / 1000 or self.config.request_timeout_s or math.inf
        if limits is not None:
            request = replace(request, limits=limits if limits.call else replace(limits, call=first + 1))
        streams = []
        for i in range(n):
            seed = (sampling.seed + i) % (1 << 64)
            own = SamplingParams(max_tokens, **{"temperature": 0.0, **params, "seed": seed})
            streams.append(Stream(owner, first + i, prompt, own, ends_at=self.now + timeout_s))
            self.streams[owner, first + i] = streams[-1]
            self.open.add((owner, first + i))
        return request, streams

    def _submit(self, owner: int, call: Submit | SubmitCall, streams: list[Stream]) -> None:
        decoded = decode(encode(call))
        assert isinstance(decoded, Submit | SubmitCall)
        self.scheduler.submit(owner, decoded, self.now)
        for stream in streams:
            stream.accepted = (owner, stream.number) in self.scheduler.live
        assert len({stream.accepted for stream in streams}) == 1, "a call is accepted whole, or not at all"
        self.read_outbox(None)

    def abort(self, *streams: Stream) -> None:
        for stream in streams:
            stream.aborted = stream.aborted or stream.ended is None
            self.scheduler.abort(stream.owner, [stream.number], self.now)
        self.read_outbox(None)

    def abort_owner(self, owner: int) -> None:
        for stream in self.streams.values():
            if stream.owner == owner and stream.ended is None:
                stream.aborted = True
        self.scheduler.abort_owner(owner, self.now)
        self.read_outbox(None)

    def expire(self) -> float | None:
        """Time has passed: nobody whose time is over is left. Returns when to look again."""
        due = self.scheduler.expire(self.now)
        self.read_outbox(None)
        late = [self.streams[key] for key in self.scheduler.live if self.streams[key].ends_at <= self.now]
        assert not late and (due is None or due > self.now), "over their time"
        return due

    def read_outbox(self, lane: Lane | None) -> None:
        self.fetches.read_orders()
        messages, self.scheduler.outbox = self.scheduler.outbox, []
        for owner, message in messages:
            message = decode(encode(message))
            if isinstance(message, Tokens):
                assert lane is not None, "tokens come from a lane"
                self._take_tokens(owner, message, lane)
            elif isinstance(message, PromptScores):
                stream = self.streams[owner, message.stream]
                assert not stream.over and stream.params.prompt_logprobs >= 0
                positions = range(message.start, message.start + len(message.widths))
                width = stream.params.prompt_logprobs + 1
                assert message.token_ids[::width].tolist() == [stream.prompt[p] for p in positions]
                stream.scored.update(positions)
            else:
                assert isinstance(message, Ended)
                stream = self.streams[owner, message.stream]
                assert message.reason != EndReason.TIMEOUT or stream.ends_at <= self.now
                stream.take_end(message)

    def _take_tokens(self, owner: int, message: Tokens, lane: Lane) -> None:
        numbers, tokens = message.streams.tolist(), message.tokens.tolist()
        assert len(set(numbers)) == len(numbers)
        for number, token in zip(numbers, tokens, strict=True):
            self.streams[owner, number].take_token(token, lane.model)
        wanted = [i for i, number in enumerate(numbers) if self.streams[owner, number].params.logprobs >= 0]
        assert message.logprobs.rows.tolist() == wanted, "logprobs for those who want them"
        starts = np.cumsum([0, *message.logprobs.widths.tolist()])[:-1]
        assert message.logprobs.token_ids[starts].tolist() == [tokens[i] for i in wanted]

    # --- executors ---

    def attach(
        self,
        blocks: int = 64,
        block_size: int = 4,
        seats: int = 8,
        budget: int = 64,
        model: ModelCard | None = None,
        host_blocks: int = 0,
        transfer: bool = False,
        spare: bool = False,
        paused: bool = False,
    ) -> Lane:
        """`transfer`: whether its executor takes part in hand-overs."""
        model = model or card()
        limits = Limits(block_size, blocks, host_blocks, seats, budget)
        point = TransferPoint("ipc://x", layout=b"l", block_bytes=8 * block_size) if transfer else None
        name = f"executor-{len(self.executors)}"
        lane = self.scheduler.attach(name, model, limits, self.now, point, spare=spare, paused=paused)
        self.executors[lane.epoch] = ModelExecutor(
            lane.epoch, model, limits, separate=self.config.prefill is Prefill.SEPARATE
        )
        self.read_outbox(None)
        return lane

    @property
    def lanes(self) -> list[Lane]:
        return list(self.scheduler.lanes.values())

    def lose(self, lane: Lane, guilty: tuple[int, ...] = (), reason: str = "lost") -> None:
        """The executor is gone, and what it had in flight."""
        self.out.pop(lane.epoch, None)
        self.fetches.lose(lane)
        self.scheduler.detach(lane, self.now, guilty=guilty, reason=reason)
        self.read_outbox(None)

    def plan(self, lane: Lane) -> Plan | None:
        """Plan an idle lane and let its executor run the plan; the result waits for `deliver`."""
        (self.closed.add if lane.num_running else self.closed.discard)(lane.epoch)
        self.leaving.discard(lane.epoch)
        self.prefills_before[lane.epoch] = lane.num_prefills_in_a_row
        plan = self.scheduler.plan(lane, self.now)
        self.read_outbox(None)
        if plan is None:
            assert not lane.resident(), "running sequences without a plan"
            return None
        tokens = len(plan.decodes) + int(plan.prefill_lengths.sum())
        assert tokens <= lane.token_budget
        assert lane.num_running <= lane.seats
        cap = self.scheduler.config.max_prefill_chunk
        assert not cap or not len(plan.prefill_lengths) or plan.prefill_lengths.max() <= cap
        received = decode(encode(plan))
        assert isinstance(received, Plan)
        result = self.executors[lane.epoch].run(received)
        self.out[lane.epoch] = Outing(received, result, lane.pool.num_available, list(lane.free_slots))
        self.plans.append(received)
        check_mirror(self, lane)
        check_seated(self, lane)
        return received

    def deliver(self, lane: Lane) -> None:
        """The result of the iteration in flight comes back."""
        self.check_fence(lane)
        result = decode(encode(self.out.pop(lane.epoch).result))
        assert isinstance(result, Result)
        self.scheduler.apply(lane, result, self.now)
        self.read_outbox(lane)

    def check_fence(self, lane: Lane) -> None:
        """While an iteration is in flight, no block and no slot becomes free."""
        outing = self.out[lane.epoch]
        assert lane.pool.num_available == outing.available_blocks and lane.free_slots == outing.free_slots, "the fence"

    def turn(self) -> bool:
        """What the loop does at each wake-up: plan every idle lane, let drained ones go. True when any has work.

        Those that are drained first: what they give up may find a place on the others in the same turn.
        """
        for lane in sorted(self.lanes, key=lambda lane: not lane.draining):
            if lane.epoch in self.out:
                continue
            preemptions = totals(self.scheduler).preemptions
            plan = self.plan(lane)
            if lane.admits:
                check_full(self, lane, plan, preempted=totals(self.scheduler).preemptions > preemptions)
            elif plan is None and lane.draining and lane.is_vacant and not lane.stays:
                self.lose(lane)
        check_reasons(self)
        return bool(self.out or self.fetches.pending)

    def iterate(self) -> bool:
        """A turn, then all results. True when there was work."""
        if not self.turn():
            return False
        for lane in self.lanes:
            if lane.epoch in self.out:
                self.deliver(lane)
        self.fetches.finish()
        return True

    def run(self, max_iterations: int = 500) -> int:
        """Iterate until nothing is left to do; returns the number of iterations.

        Progress: no more iterations pass without a generated token than there are known tokens to compute.
        """
        generated, last = totals(self.scheduler).generation_tokens, 0
        for count in range(max_iterations):
            if not self.iterate():
                return count
            self.check()
            if totals(self.scheduler).generation_tokens > generated:
                generated, last = totals(self.scheduler).generation_tokens, count
            known = sum(sequence.num_tokens for sequence in self.scheduler.live.values())
            assert count - last <= 2 * known, "iterations bring no token"
        raise AssertionError(f"still at work after {max_iterations} iterations")

    def leave(self, lane: Lane) -> None:
        """An executor says that it wants to go; the core hears it at the lane's next plan."""
        self.scheduler.leave(lane, self.now)
        self.read_outbox(None)
        self.leaving.add(lane.epoch)

    def pause(self, lane: Lane) -> None:
        """An operator drains it, to have it back later."""
        self.scheduler.pause(lane, self.now)
        self.read_outbox(None)
        self.leaving.add(lane.epoch)

    def resume(self, lane: Lane) -> None:
        self.scheduler.resume(lane, self.now)
        self.read_outbox(None)
        if not lane.draining:
            self.leaving.discard(lane.epoch)

    def drain(self, lane: Lane) -> None:
        """An executor says that it wants to go. Where no iteration of it is out, its next plan is made now."""
        self.leave(lane)
        if lane.epoch not in self.out:
            self.plan(lane)

    # --- checks ---

    def check(self) -> None:
        """All that holds at any time, see DESIGN section 4."""
        self.scheduler.check_invariants()
        check_tokens(self)
        check_waited(self)
        for lane in self.lanes:
            assert (lane.in_flight is not None) == (lane.epoch in self.out)
            if lane.in_flight is not None:
                self.check_fence(lane)

    def check_idle(self) -> None:
        """Nothing is left: every accepted stream has ended, and every pool is free or evictable."""
        self.check()
        assert not self.scheduler.live
        assert not any(len(queue) for queue in self.scheduler.queues.values())
        assert all(stream.over for stream in self.streams.values())
        for lane in self.lanes:
            assert lane.is_vacant and not lane.pool.num_referenced and not lane.host.num_held
            assert sorted(lane.free_slots) == list(range(lane.seats))

    def waiting(self, model: str = "m") -> list[Sequence]:
        """Waiting sequences in the order of service."""
        found = [s for s in self.scheduler.live.values() if s.state is State.WAITING and s.model == model]
        share = self.scheduler.queues[model].share
        if share is None:
            return sorted(found, key=lambda sequence: sequence.key)
        return sorted(found, key=lambda s: (s.rank, share.counter(s.tenant), s.number))

    def sequence(self, stream: Stream) -> Sequence:
        return self.scheduler.live[stream.owner, stream.number]

    def members(self, lane: Lane) -> list[int]:
        """Stream numbers in the iteration that is in flight, decodes first."""
        plan = self.out[lane.epoch].plan
        return [int(lane.stream[slot]) for slot in [*plan.decodes.tolist(), *plan.prefills.tolist()]]
