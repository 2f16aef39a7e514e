"""The scheduler: a handful of verbs on queues and lanes. Pure: no I/O, no clock, no randomness.

`submit`, `abort`, `attach`, `detach`, `pause`, `resume`, `plan`, `apply`, `fetched`, `expire`. What frontends must be
told gathers in `outbox`, what executors must be told beside their plans in `handovers.orders`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from common.wire import Ended, EndReason, FinishCode, Limits, ModelCard, Plan, Result, Submit, SubmitCall, TransferPoint
from common.wire.codec import Message
from scheduler_svc.core.applier import apply_result
from scheduler_svc.core.attachment import MAX_LANES, AttachError, check_alike
from scheduler_svc.core.availability import Availability
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.counters import Counters
from scheduler_svc.core.drain_rate import DrainRate
from scheduler_svc.core.draining import give_back, move_away, settle
from scheduler_svc.core.handover import Handovers
from scheduler_svc.core.intake import misfit, outlived, overload, sequences_of, streams_of
from scheduler_svc.core.invariants import check_books
from scheduler_svc.core.key_usage import KeyUsage
from scheduler_svc.core.lane import Lane, drop_swapped
from scheduler_svc.core.model_queue import ModelQueue
from scheduler_svc.core.observing import observe
from scheduler_svc.core.planner import Planner
from scheduler_svc.core.reasons import why_aside
from scheduler_svc.core.reporting import prompt_scores, times_of, token_messages
from scheduler_svc.core.seating import Seating
from scheduler_svc.core.sequence import Sequence, State, WaitReason
from scheduler_svc.core.timeouts import Timeouts


class Scheduler:
    """All scheduling state of one scheduler service."""

    def __init__(self, config: SchedulerConfig, *, first_epoch: int = 1) -> None:
        """`first_epoch` must be above every epoch of an earlier scheduler that executors may still hold."""
        self.config = config
        self.counters = Counters()
        self.lanes: dict[int, Lane] = {}
        """By epoch."""
        self.queues: dict[str, ModelQueue] = {}
        """By model name; a model stays known when its last executor has gone."""
        self.availability = Availability(config, self.lanes, self.queues)
        self.outbox: list[tuple[int, Message]] = []
        """(frontend, message) in the order in which they must be sent."""
        self.live: dict[tuple[int, int], Sequence] = {}
        """Every accepted sequence that has not ended, by (frontend, stream)."""
        self.by_request: dict[str, dict[int, Sequence]] = {}
        """The same, by request id, then number; clients may use one id for many requests."""
        self.key_usage = KeyUsage()
        self.handovers = Handovers(config, self.counters)
        self._num_submitted = 0
        self._last_epoch = first_epoch - 1
        self._drain_rate = DrainRate()
        self._timeouts = Timeouts()

    # --- requests ---

    def submit(self, owner: int, call: Submit | SubmitCall, now: float) -> None:
        """Accept all sequences of a call, or end each with the reason why not."""
        refusal = self._refusal(owner, call.requests, now)
        if refusal is not None:
            self.refuse(owner, call, refusal)
            return
        for request in call.requests:
            self._accept(owner, request, now)

    def _accept(self, owner: int, request: Submit, now: float) -> None:
        queue = self.queues[request.model]
        queue.counters.request_n.observe(request.n)
        queue.counters.request_max_tokens.observe(request.params.max_tokens)
        key_row = self.key_usage.begin(owner, request, now)
        for sequence in sequences_of(owner, request, self._num_submitted, now, self.config, key_row):
            self._num_submitted += 1
            self.live[owner, sequence.stream] = sequence
            self.by_request.setdefault(request.request_id, {})[sequence.number] = sequence
            self._timeouts.watch(sequence)
            queue.begin(sequence)
            queue.add(sequence, now)

    def refuse(self, owner: int, call: Submit | SubmitCall, answer: Ended) -> None:
        """End every stream of a call with this answer, without accepting it."""
        streams, reason = streams_of(call.requests), EndReason(answer.reason).name
        self.counters.ended[reason] += len(streams)
        queue = self.queues.get(call.requests[0].model)
        if queue is not None:  # a name that no executor ever brought must not become a label
            queue.counters.refused[reason] += len(streams)
        self.outbox.extend((owner, replace(answer, stream=stream)) for stream in streams)

    def _refusal(self, owner: int, requests: tuple[Submit, ...], now: float) -> Ended | None:
        """The answer to a call that cannot be accepted."""
        model = requests[0].model
        queue = self.queues.get(model)
        if queue is None or not self.availability.is_offered(model, now):
            return Ended(0, EndReason.NO_EXECUTOR, message=f"no executor serves the model {model!r}")
        if any((owner, stream) in self.live for stream in streams_of(requests)):
            return Ended(0, EndReason.REJECTED, message="the stream number is in use")
        refusal = overload(requests, queue, self.config, self._drain_rate)
        if refusal is not None:
            return refusal
        card, kv_tokens = self.availability.models[model], self.availability.kv_capacity[model]
        text = next(filter(None, (misfit(request, card, kv_tokens) for request in requests)), "")
        return Ended(0, EndReason.REJECTED, message=text) if text else self.key_usage.refusal(owner, requests, now)

    def abort(self, owner: int, streams: Iterable[int], now: float, *, stopped: bool = False) -> None:
        """Drop these streams. Unknown and ended ones are passed over. `stopped`: their answers are whole."""
        reason = EndReason.STOP_STRING if stopped else EndReason.ABORTED
        for stream in streams:
            sequence = self.live.get((owner, stream))
            if sequence is None:
                continue
            if stopped and sequence.first_token_at >= 0:
                self._observe_answer(sequence, now)
                self._note_drain(1, now)
            self._finish(sequence, reason, now)

    def abort_owner(self, owner: int, now: float) -> None:
        """Drop all streams of a frontend."""
        self.abort(owner, [stream for frontend, stream in self.live if frontend == owner], now)

    def end_all(self, reason: EndReason, message: str, now: float) -> None:
        """End every live sequence, at shutdown."""
        for sequence in list(self.live.values()):
            self._end(sequence, reason, now, message)

    def _end(self, sequence: Sequence, reason: EndReason, now: float, message: str = "") -> None:
        """A live sequence is over: free what it holds and tell its frontend."""
        self._finish(sequence, reason, now)
        cached, times = max(sequence.cached_tokens, 0), times_of(sequence, now)
        self.outbox.append((sequence.owner, Ended(sequence.stream, reason, cached, message, times=times)))

    def _finish(self, sequence: Sequence, reason: EndReason, now: float) -> None:
        """Take a sequence out of everything, but for what an iteration in flight may still write (the fence)."""
        lane, queue = sequence.lane, self.queues[sequence.model]
        if lane is None:
            queue.remove(sequence, now)
            drop_swapped(sequence)
            sequence.state = State.FINISHED
        elif sequence.slot in lane.arriving:
            sequence.aborted = True
            self.handovers.give_up(sequence)
        elif lane.in_flight is not None:
            sequence.aborted = True
            lane.in_flight.deferred.append(sequence)
        else:
            lane.release(sequence, State.FINISHED)
        queue.end(sequence)
        self._pass_longest_on(queue, sequence)
        self._timeouts.forget(sequence)
        self.key_usage.end(sequence)
        del self.live[sequence.owner, sequence.stream]
        siblings = self.by_request[sequence.request_id]
        del siblings[sequence.number]
        if not siblings:
            del self.by_request[sequence.request_id]
        self.counters.ended[reason.name] += 1
        queue.counters.ended[reason.name] += 1

    # --- lanes ---

    def attach(
        self,
        name: str,
        model: ModelCard,
        limits: Limits,
        now: float,
        transfer: TransferPoint | None = None,
        *,
        spare: bool = False,
        paused: bool = False,
    ) -> Lane:
        """Open a lane for an executor, under a new epoch. Raises `AttachError`, with the reason, if it does not fit.

        `paused`: closed from the beginning, as `pause` does it.
        """
        if len(self.lanes) >= MAX_LANES:
            raise AttachError(f"{MAX_LANES} executors are attached already")
        peers = self.availability.lanes_of(model.name)
        for peer in peers:
            check_alike(peer, model, limits)
        self.availability.make_room(model)
        try:
            lane = Lane(self._last_epoch + 1, name, model, limits, self.config, transfer, spare)
        except MemoryError:
            raise AttachError(f"no memory for the state of {limits.max_num_seqs} sequences of this length") from None
        self._last_epoch = lane.epoch
        self.lanes[lane.epoch] = lane
        self.availability.models[model.name] = model
        queue = self.queues.setdefault(model.name, ModelQueue(self.config, self.counters))
        queue.long_threshold = self.config.long_threshold(min(o.token_budget for o in (lane, *peers)))
        for sequence in list(queue):
            text = outlived(sequence, model)
            if text:
                self._end(sequence, EndReason.FAILED, now, text)
        if paused:
            lane.draining = lane.stays = True
            self.availability.came_closed(lane, now)
        else:
            self.availability.more_admit(model.name, now)
        return lane

    def detach(self, lane: Lane, now: float, *, guilty: Iterable[int] = (), reason: str = "") -> None:
        """Close a lane, which is lost where there is a `reason`. Its sequences wait again with their tokens; `guilty`
        slots end with an error.

        Who was in a lost iteration gets a strike. From the second on they are suspects, each of whom the planner runs
        beside nobody who has one: the harmless ones clear themselves with their next token, the guilty one ends alone.
        """
        del self.lanes[lane.epoch]
        self.counters.lanes_lost += bool(reason)
        blamed = {lane.occupant[slot] for slot in guilty if slot < lane.seats}
        members = lane.members_in_flight()
        lane.in_flight = None
        self.handovers.lose(lane)
        queue = self.queues[lane.model.name]
        for sequence in queue:
            if sequence.swapped is not None and sequence.swapped.lane is lane:
                sequence.swapped = None
        for sequence in lane.running():
            lane.release(sequence, State.FINISHED if sequence.aborted else State.WAITING)
            if sequence.aborted:
                continue
            self.availability.hold_anew(lane, now)
            if reason:
                queue.counters.failovers += 1
                sequence.num_failovers += 1
                sequence.lost_at = now
            if sequence in members:
                sequence.strike()
            queue.add(sequence, now)
            if sequence in blamed:
                self._end(sequence, EndReason.FAILED, now, reason or "the executor refused this sequence")
            elif sequence.strikes >= self.config.max_strikes:
                self._end(sequence, EndReason.FAILED, now, f"every executor that ran it failed; last: {reason}")
        self.availability.fewer_admit(lane.model.name, now)

    def leave(self, lane: Lane, now: float) -> None:
        """An executor shall go: give its lane no new sequence; from its next plan on its own move to others."""
        lane.stays = False
        self._close(lane, now)

    def pause(self, lane: Lane, now: float) -> None:
        """As `leave`, but the executor stays, to be resumed. One that shall go already still goes."""
        lane.stays = lane.stays or not lane.draining
        self._close(lane, now)

    def _close(self, lane: Lane, now: float) -> None:
        if not lane.draining:
            lane.draining = True
            self.availability.fewer_admit(lane.model.name, now)

    def resume(self, lane: Lane, now: float) -> None:
        """A lane that `pause` has closed takes new sequences again, with those it still has; on others: nothing."""
        if lane.stays:
            lane.draining = lane.stays = lane.must_empty = False
            self.availability.more_admit(lane.model.name, now)

    def vacate(self, lane: Lane, now: float) -> None:
        """From its next plan on, a lane that drains gives back also the sequences for which no other has room now."""
        lane.must_empty = lane.draining

    def _move_away(self, lane: Lane, now: float) -> None:
        """Move the sequences of an idle lane to others, as many as those have seats and blocks for."""
        peers = [peer for peer in self.availability.admitting(lane.model.name) if peer is not lane]
        move_away(lane, peers, self.queues[lane.model.name], self.handovers, now)

    def fetched(self, lane: Lane, ticket: int, now: float, *, done: bool, busy_s: float) -> None:
        """The lane's executor has the KV of a hand-over (`done`), or will not get it. Unknown tickets are passed by."""
        transit, model = self.handovers.end(lane, ticket, done=done, busy_s=busy_s), lane.model.name
        if transit is None:
            return
        settle(transit, self.queues[model], now, done=done)
        if not done and not lane.admits:
            self.availability.hold_anew(lane, now)

    def expire(self, now: float) -> float | None:
        """End what is over its time or has waited out the hold time, and count how long all wait.

        Returns when to call again, or None.
        """
        for queue in self.queues.values():
            queue.advance(now)
        while (late := self._timeouts.take_due(now)) is not None:
            self._end(late, EndReason.TIMEOUT, now, f"not done within {late.ends_at - late.arrived:g} s")
        for sequence, text in self.availability.take_overdue(now):
            self._end(sequence, EndReason.NO_EXECUTOR, now, text)
        times = (self._timeouts.next_at(), self.availability.next_due(now))
        return min((at for at in times if at is not None), default=None)

    # --- iterations ---

    def plan(self, lane: Lane, now: float) -> Plan | None:
        """The lane's next iteration, or None when it has nothing to run. The lane must be idle."""
        model = lane.model.name
        if lane.draining:
            self._move_away(lane, now)
            if lane.must_empty and give_back(lane, self.availability.admitting(model), self.queues[model], now):
                self.availability.hold_anew(lane, now)
        peers = [other for other in self.availability.admitting(model) if other is not lane]
        queue = self.queues[model]
        seating = Seating(lane, peers, queue, now)
        preemptions = queue.counters.preemptions
        plan = Planner(lane, queue, seating, self.counters, now).build()
        if not lane.admits and queue.counters.preemptions > preemptions:
            self.availability.hold_anew(lane, now)  # Who gave way here finds no seat here again.
        return plan

    def apply(self, lane: Lane, result: Result, now: float) -> None:
        """Take an iteration's outcome. Raises `LaneError` when it cannot be one; then `detach` the lane."""
        flight, applied = apply_result(lane, result)
        for sequence in applied.first_tokens:
            sequence.fingerprint = lane.model.fingerprint
        queue = self.queues[lane.model.name]
        observe(self.counters, self.key_usage, queue, lane, flight, applied, now, result.busy_us / 1e6)
        self.outbox.extend(token_messages(lane, result, applied))
        self.outbox.extend(prompt_scores(lane, result))
        for sequence, code in applied.finished:
            if code is FinishCode.STUCK:
                self._end(sequence, EndReason.FAILED, now, "what the request allows leaves no token to go on with")
                continue
            self._observe_answer(sequence, now, was_cut=code is FinishCode.LENGTH)
            self._end(sequence, EndReason(code), now)
        for sequence in flight.deferred:
            lane.release(sequence, State.FINISHED)
        if applied.finished:
            self._note_drain(len(applied.finished), now)

    def _note_drain(self, count: int, now: float) -> None:
        others_wait = any(len(queue) for queue in self.queues.values())
        self._drain_rate.note(count, now, others_wait=others_wait)

    def _observe_answer(self, sequence: Sequence, now: float, *, was_cut: bool = False) -> None:
        """A sequence has its whole answer, or was cut at its length."""
        queue = self.queues[sequence.model]
        if not was_cut:  # else it tells nothing of how long answers are
            queue.lengths.observe(sequence.tenant, sequence.num_generated)
        queue.counters.observe_finished(sequence, now)
        sequence.longest_answer = max(sequence.longest_answer, sequence.num_generated)

    def _pass_longest_on(self, queue: ModelQueue, sequence: Sequence) -> None:
        """Of a request's whole answers the longest counts, when its last sequence ends, in whatever way."""
        longest, first = sequence.longest_answer, sequence.stream - sequence.index
        if not longest:
            return
        for stream in range(first, first + sequence.n if sequence.n > 1 else first):
            sibling = self.live.get((sequence.owner, stream))
            if sibling is not None and sibling is not sequence:
                sibling.longest_answer = max(sibling.longest_answer, longest)
                return
        queue.counters.request_longest_generation.observe(longest)

    # --- questions ---

    def why(self, sequence: Sequence) -> WaitReason:
        """Why a live sequence is not in an iteration now; NONE when it is, or when none is in flight."""
        if sequence.lane is not None:
            return why_aside(sequence.lane, sequence)
        return self.queues[sequence.model].why(sequence)

    def waiting_by_reason(self) -> Counter[WaitReason]:
        """How many wait for what."""
        counts: Counter[WaitReason] = Counter()
        for queue in self.queues.values():
            counts += queue.by_reason()
        return counts

    def check_invariants(self, turn: int | None = None) -> None:
        """Raise AssertionError unless membership, limits and conservation hold (DESIGN section 4).

        With `turn`, the seats and blocks of one lane only: another at each turn.
        """
        check_books(self, turn)
        assert len(self._timeouts) == sum(s.ends_at < math.inf for s in self.live.values())
        self.key_usage.check_invariants(self.live.values())
