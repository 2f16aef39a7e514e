"""Runs plans by a script: real batch state and checks, pseudo model, and failures where the script wants them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from common.wire import Fault, Limits, LogprobColumns, ModelCard, Plan, PromptLogprobs, Result
from common.wire.executor import no_slots
from executor_svc.batch import BatchState, PlanError, Work
from executor_svc.pseudo_model import PseudoModel
from executor_svc.script import Action, Script


class Dead(Exception):
    """A scripted death."""


class ScriptedRunner:
    """Runs a scripted executor's plans.

    All but `hold`, `release`, `follow`, `die`, `wait_plans` run in the link's thread.
    """

    def __init__(
        self,
        script: Script,
        model: ModelCard,
        limits: Limits,
        *,
        verify: bool = True,
        record_plans: bool = True,
        on_death: Callable[[], None] | None = None,
    ) -> None:
        self.script, self.model, self.limits = script, model, limits
        self._record_plans, self._on_death = record_plans, on_death
        self.state = BatchState(limits, model.max_model_len, model.vocab_size, model.eos_ids)
        alphabet = script.alphabet or tuple(i for i in range(model.vocab_size) if i not in model.eos_ids)
        self.alphabet = np.array(alphabet, np.int64)
        self.pseudo = PseudoModel(self.state, self.alphabet, verify)
        self.plans: list[Plan] = []
        self.num_plans = 0
        self.last_action: Action | None = None
        self.faults: list[Fault] = []
        self._forced: dict[int, tuple[int, ...]] = {}
        self._gate = threading.Condition()
        self._permits: int | None = None
        """How many plans may pass; None: all."""
        self._dying = False
        self._next_script: Script | None = None
        self._counted_from = 0
        """Plans that had come when the present script was given."""

    # --- from other threads ---

    def hold(self) -> None:
        with self._gate:
            self._permits = 0

    def release(self, count: int | None = None) -> None:
        with self._gate:
            self._permits = None if count is None else (self._permits or 0) + count
            self._gate.notify_all()

    def follow(self, script: Script) -> None:
        """Another script from the next plan on; one that hangs now goes on. Also from a signal handler."""
        with self._gate:
            self._next_script = script
            self._gate.notify_all()

    def die(self) -> None:
        with self._gate:
            self._dying = True
            self._gate.notify_all()

    def wait_plans(self, count: int, timeout_s: float) -> None:
        with self._gate:
            if not self._gate.wait_for(lambda: self.num_plans >= count, timeout_s):
                raise TimeoutError(f"{self.num_plans} plans have come, not {count}")

    # --- in the link's thread ---

    def next_action(self) -> Action | None:
        if self._next_script is not None:
            self.script, self._next_script = self._next_script, None
            self._counted_from = self.num_plans
        return self.script.actions.get(self.num_plans - self._counted_from + 1)

    def reset(self) -> None:
        self.state.clear()
        self._forced.clear()

    def run(self, plan: Plan) -> Result | Fault:
        self.last_action = action = self.next_action()
        with self._gate:
            self.num_plans += 1
            if self._record_plans:
                self.plans.append(plan)
            self._gate.notify_all()
        started = time.perf_counter()
        try:
            work = self.state.apply(plan)
        except PlanError as error:
            return self._fault(plan, "plan", str(error), error.slots)
        poisoned = self._poisoned(work)
        if len(poisoned):
            self.last_action = action = self.script.poison_action
        if action is Action.DIE_BEFORE:
            self._end()
        self._wait(hang=action in (Action.HANG, Action.SILENCE))
        if action is Action.FAULT:
            named = poisoned if self.script.name_poisoned else no_slots()
            return self._fault(plan, "scripted", "a fault by the script", named)
        result = self._compute(plan, work, started)
        if action is Action.DIE_AFTER:
            self._end()
        return result

    def _fault(self, plan: Plan, reason: str, message: str, slots: NDArray[np.integer]) -> Fault:
        fault = Fault(plan.epoch, plan.iteration, slots.astype(np.uint16), reason, message)
        self.faults.append(fault)
        return fault

    def _end(self) -> None:
        if self._on_death is not None:
            self._on_death()
        raise Dead

    def _wait(self, *, hang: bool) -> None:
        with self._gate:
            if self.script.delay_s:
                self._gate.wait_for(lambda: self._dying, self.script.delay_s)
            if hang:
                self._gate.wait_for(lambda: self._dying or self._next_script is not None)
            self._gate.wait_for(lambda: self._dying or self._permits != 0)
            if self._dying:
                self._end()
            if self._permits is not None:
                self._permits -= 1

    def _poisoned(self, work: Work) -> NDArray[np.int64]:
        """Slots of this iteration whose prompt holds the poison token."""
        poison, state = self.script.poison_token, self.state
        if poison is None:
            return np.empty(0, np.int64)
        found = [s for s in work.slots.tolist() if poison in state.tokens[s, : state.prompt_length[s]]]
        return np.array(found, np.int64)

    def _compute(self, plan: Plan, work: Work, started: float) -> Result:
        self.pseudo.move(plan.copies, plan.swap_outs, plan.swap_ins)
        tokens = self.pseudo.forward(work)
        self._direct(plan, work, tokens)
        prompt_logprobs = tuple(self._prompt_logprobs(work, row) for row in work.prompt_rows.tolist())
        finish = self.state.advance(work, tokens)
        return Result(
            epoch=plan.epoch,
            iteration=plan.iteration,
            tokens=tokens.astype(np.int32),
            finish=finish,
            logprobs=self._logprobs(work, tokens),
            prompt_logprobs=prompt_logprobs,
            busy_us=int((time.perf_counter() - started) * 1e6),
        )

    def _direct(self, plan: Plan, work: Work, tokens: NDArray[np.int64]) -> None:
        """Put the script's tokens in place of the pseudo model's."""
        script, state = self.script, self.state
        slots = work.sample_slots
        if script.eos_after is not None and self.model.eos_ids:
            ends = state.length[slots] >= np.maximum(
                state.prompt_length[slots] + script.eos_after, state.min_length[slots]
            )
            tokens[ends & ~state.ignore_eos[slots]] = self.model.eos_ids[0]
        for new in plan.new:
            self._forced.pop(new.slot, None)
            prompt = new.tokens[: new.prompt_length]
            forced = next((item for item in script.forced if item.applies(prompt)), None)
            if forced is not None:
                self._forced[new.slot] = (*forced.tokens, *self.model.eos_ids[:1])
        if self._forced or script.choose is not None:
            for row, slot in enumerate(slots.tolist()):
                tokens[row] = self._directed(slot, int(tokens[row]))

    def _directed(self, slot: int, token: int) -> int:
        state = self.state
        length, prompt_length = int(state.length[slot]), int(state.prompt_length[slot])
        forced = self._forced.get(slot, ())
        if length - prompt_length < len(forced):
            return forced[length - prompt_length]
        params = state.params[slot]
        if self.script.choose is not None and params is not None:
            return self.script.choose(state.tokens[slot, :length].copy(), prompt_length, params)
        return token

    def _logprobs(self, work: Work, tokens: NDArray[np.int64]) -> LogprobColumns:
        wanted = self.state.logprobs[work.sample_slots]
        rows = np.flatnonzero(wanted >= 0)
        if not len(rows):
            return LogprobColumns()
        entries = [self._entries(int(tokens[row]), int(wanted[row])) for row in rows.tolist()]
        return LogprobColumns(
            rows=rows.astype(np.uint16),
            widths=np.array([len(ids) for ids, _ in entries], np.uint16),
            token_ids=np.concatenate([ids for ids, _ in entries]),
            values=np.concatenate([values for _, values in entries]),
        )

    def _entries(self, token: int, count: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Made-up logprobs: the token itself, then it and its successors as the most likely ones."""
        chosen = -(1 + token % 7) / 8 if self.script.chosen_logprob is None else self.script.chosen_logprob
        ids = (token + np.arange(count)) % self.model.vocab_size
        values = chosen - np.arange(count)
        return np.concatenate(([token], ids)).astype(np.int32), np.concatenate(([chosen], values)).astype(np.float32)

    def _prompt_logprobs(self, work: Work, row: int) -> PromptLogprobs:
        slot = int(work.slots[row])
        start = int(self.state.computed[slot]) + 1
        stop = min(int(work.context_lens[row]) + 1, int(self.state.prompt_length[slot]))
        count = int(self.state.prompt_logprobs[slot])
        entries = [self._entries(token, count) for token in self.state.tokens[slot, start:stop].tolist()]
        return PromptLogprobs(
            slot=slot,
            start=start,
            widths=np.full(len(entries), count + 1, np.uint16),
            token_ids=np.concatenate([ids for ids, _ in entries]),
            values=np.concatenate([values for _, values in entries]),
        )
