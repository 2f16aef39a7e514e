"""An executor in plain Python, and the pseudo language model that it runs: what the core's plans are checked against.

The next token is a pure function of the model and of the whole history. A KV entry is the state of the history up to
its position, so a block that holds anything else than the reader's own history shows at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from common.wire import (
    FinishCode,
    Limits,
    LogprobColumns,
    ModelCard,
    NewSequence,
    Plan,
    PromptLogprobs,
    Result,
    SamplingParams,
)

EOS = 1
_MASK = (1 << 64) - 1


def card(fingerprint: bytes = b"weights", *, name: str = "m", vocab_size: int = 40, max_len: int = 48) -> ModelCard:
    return ModelCard(name, fingerprint, vocab_size, max_len, (EOS,), "float32")


def _mix(value: int) -> int:
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def start_state(model: ModelCard) -> int:
    return int.from_bytes(model.fingerprint[:8], "little")


def next_state(state: int, token: int) -> int:
    return _mix((state * 0x9E3779B97F4A7C15 + token + 1) & _MASK)


def states_of(model: ModelCard, tokens: list[int]) -> list[int]:
    """The state after each token."""
    states, state = [], start_state(model)
    for token in tokens:
        state = next_state(state, token)
        states.append(state)
    return states


def next_token(model: ModelCard, state: int, params: SamplingParams) -> int:
    """A sixteenth of the draws is EOS; one that samples depends on its seed too."""
    draw = _mix(state ^ _mix(params.seed + 1 if params.temperature > 0 else 0))
    if draw % 16 == 0:
        return EOS
    return 2 + (draw >> 8) % (model.vocab_size - 2)


def finish_code(token: int, length: int, prompt_length: int, model: ModelCard, params: SamplingParams) -> FinishCode:
    if token in model.eos_ids and not params.ignore_eos:
        return FinishCode.EOS
    if token in params.stop_token_ids:
        return FinishCode.STOP_TOKEN
    if length >= min(prompt_length + params.max_tokens, model.max_model_len):
        return FinishCode.LENGTH
    return FinishCode.CONTINUE


def solo_answer(model: ModelCard, prompt: list[int], params: SamplingParams) -> tuple[list[int], FinishCode]:
    """What the model says when it is alone, and how it ends."""
    tokens, state = list(prompt), states_of(model, prompt)[-1]
    while True:
        token = next_token(model, state, params)
        tokens.append(token)
        state = next_state(state, token)
        code = finish_code(token, len(tokens), len(prompt), model, params)
        if code is not FinishCode.CONTINUE:
            return tokens[len(prompt) :], code


@dataclass
class Row:
    """What an executor knows of one resident sequence."""

    generation: int
    tokens: list[int]
    states: list[int]
    prompt_length: int
    computed: int
    blocks: list[int]
    params: SamplingParams
    decodes: bool = False
    """Whether it has sampled since it was admitted."""
    finished: bool = False
    scored: int = 0
    """Prompt positions below this have been scored."""
    unready: int = 0
    """How many times more it gets no token, as one whose constraint is not ready."""

    @property
    def left(self) -> int:
        return len(self.tokens) - self.computed


@dataclass
class ModelExecutor:
    """Runs plans; an AssertionError tells what is wrong with one."""

    epoch: int
    model: ModelCard
    limits: Limits
    separate: bool = False
    """Whether an iteration holds prefills or decodes, never both."""
    rows: dict[int, Row] = field(default_factory=dict)
    kv: dict[int, list[int | None]] = field(default_factory=dict)
    """Block -> the state that each of its positions holds."""
    host_kv: dict[int, list[int | None]] = field(default_factory=dict)
    lent: dict[int, list[int]] = field(default_factory=dict)
    """Blocks that another executor may read, by ticket."""
    fetched: set[int] = field(default_factory=set)
    """Blocks that came from another executor and were not given out anew since."""
    generations: dict[int, int] = field(default_factory=dict)
    iteration: int = 0
    computed_tokens: int = 0

    def run(self, plan: Plan) -> Result:
        assert plan.epoch == self.epoch, "a plan of another epoch"
        assert plan.iteration == self.iteration + 1, "iterations rise by one"
        self.iteration += 1
        for slot in plan.freed.tolist():
            assert self.rows.pop(slot, None) is not None, f"slot {slot} freed but empty"
        swapped_in = self._swap(plan)
        for new in plan.new:
            self._admit(new, swapped_in)
        for slot, block in zip(plan.appended_slots.tolist(), plan.appended_blocks.tolist(), strict=True):
            self._own(slot, [block])
        self._check_membership(plan)
        work = [(slot, 1) for slot in plan.decodes.tolist()]
        work += list(zip(plan.prefills.tolist(), plan.prefill_lengths.tolist(), strict=True))
        scores = [part for slot, count in work for part in self._compute(slot, count)]
        sampling = [slot for slot, _ in work if not self.rows[slot].left]
        return self._sample(sampling, tuple(scores))

    def _swap(self, plan: Plan) -> set[int]:
        """Move blocks to the host and back; returns the device blocks that were filled."""
        outs, ins = plan.swap_outs.reshape(-1, 2).tolist(), plan.swap_ins.reshape(-1, 2).tolist()
        assert len({host for _, host in outs}) == len(outs), "two blocks swapped out into one"
        assert len({device for _, device in ins}) == len(ins), "two blocks swapped in into one"
        for device, host in outs:
            assert 0 <= host < self.limits.num_host_blocks, "host block out of range"
            self.host_kv[host] = list(self.kv[device])
        for host, device in ins:
            assert not [s for s, row in self.rows.items() if device in row.blocks], "swapped in over a block in use"
            self.kv[device] = list(self.host_kv[host])
        return {device for _, device in ins}

    def write(self, block: int, content: list[int | None]) -> None:
        """A block comes from another executor."""
        assert 0 <= block < self.limits.num_blocks, "block out of range"
        self.kv[block] = list(content)

    def _admit(self, new: NewSequence, swapped_in: set[int]) -> None:
        assert 0 <= new.slot < self.limits.max_num_seqs, "slot out of range"
        assert new.slot not in self.rows, f"slot {new.slot} admitted but not empty"
        assert new.generation > self.generations.get(new.slot, 0), "a generation must rise"
        self.generations[new.slot] = new.generation
        tokens, blocks = new.tokens.tolist(), new.blocks.tolist()
        assert len(tokens) < self.model.max_model_len, "no room for a next token"
        whole, part = divmod(new.computed, self.limits.block_size)
        assert not part or blocks[whole] in swapped_in | self.fetched, "a hit covers whole blocks"
        whole += part > 0
        for block in swapped_in & set(blocks):
            assert blocks.index(block) < whole, "swapped in and not used"
        shared = blocks[:whole]
        row = Row(
            new.generation,
            tokens,
            states_of(self.model, tokens),
            new.prompt_length,
            new.computed,
            shared,
            new.params,
            unready=int(new.params.constraint.allowed_ids[:1].sum()),
        )
        self.rows[new.slot] = row
        missed = new.params.prompt_logprobs >= 0 and new.computed and not (swapped_in | self.fetched) & set(blocks)
        assert not missed, "a hit would leave prompt logprobs out"
        self._check_content(new.slot, new.computed)
        self._own(new.slot, blocks[whole:])

    def _own(self, slot: int, blocks: list[int]) -> None:
        """Blocks that this row is going to write: nobody else may have them."""
        assert slot in self.rows, f"blocks appended to the empty slot {slot}"
        for block in blocks:
            assert 0 <= block < self.limits.num_blocks, "block out of range"
            holders = [s for s, row in self.rows.items() if block in row.blocks]
            assert not holders, f"block {block} given to slot {slot}, but slots {holders} hold it"
            self.rows[slot].blocks.append(block)
            self.fetched.discard(block)
            self.kv[block] = [None] * self.limits.block_size

    def _check_membership(self, plan: Plan) -> None:
        decodes, prefills = plan.decodes.tolist(), plan.prefills.tolist()
        assert decodes or prefills, "an empty iteration"
        assert len(set(decodes + prefills)) == len(decodes) + len(prefills), "a slot twice in one iteration"
        tokens = len(decodes) + sum(plan.prefill_lengths.tolist())
        assert tokens <= self.limits.max_num_batched_tokens, "over the token limit"
        assert len(self.rows) <= self.limits.max_num_seqs, "over the seats"
        for slot in decodes + prefills:
            assert slot in self.rows, f"work for the empty slot {slot}"
            assert not self.rows[slot].finished, f"work for the finished slot {slot}"
        for slot in decodes:
            assert self.rows[slot].left == 1, "a decode has one token without KV"
        if self.separate:
            assert not decodes or not prefills, "decodes beside prefills"
            if prefills:
                return
        started = [slot for slot, row in self.rows.items() if row.decodes and not row.finished]
        assert sorted(started) == sorted(decodes), "a decode was left out, or begins with a prefill"

    def _compute(self, slot: int, count: int) -> list[PromptLogprobs]:
        row, size = self.rows[slot], self.limits.block_size
        assert 1 <= count <= row.left, "a chunk within the known tokens"
        first, end = row.computed, row.computed + count
        assert end <= len(row.blocks) * size, "too few blocks"
        for position in range(first, end):
            content = self.kv[row.blocks[position // size]]
            content[position % size] = row.states[position]
        row.computed = end
        self.computed_tokens += count
        self._check_content(slot, end)
        return self._score(slot, first, end)

    def _check_content(self, slot: int, count: int) -> None:
        """The first `count` positions of a row hold its own history."""
        row, size = self.rows[slot], self.limits.block_size
        for position in range(count):
            held = self.kv.get(row.blocks[position // size], [None] * size)[position % size]
            assert held == row.states[position], f"slot {slot} reads a stale block at position {position}"

    def _score(self, slot: int, first: int, end: int) -> list[PromptLogprobs]:
        row = self.rows[slot]
        wanted = row.params.prompt_logprobs
        start, stop = first + 1, min(end + 1, row.prompt_length)
        if wanted < 0 or start >= stop:
            return []
        entries = [_entries(token, wanted) for token in row.tokens[start:stop]]
        ids = np.concatenate([ids for ids, _ in entries])
        values = np.concatenate([values for _, values in entries])
        return [PromptLogprobs(slot, start, np.full(stop - start, wanted + 1, np.uint16), ids, values)]

    def _sample(self, slots: list[int], scores: tuple[PromptLogprobs, ...]) -> Result:
        tokens, codes = [], []
        for slot in slots:
            row = self.rows[slot]
            bound = row.params.constraint.allowed_ids.tolist()
            if row.unready or (len(bound) > 1 and len(row.tokens) == row.prompt_length + bound[1]):
                codes.append(FinishCode.NOT_READY if row.unready else FinishCode.STUCK)
                tokens.append(0)
                row.finished = not row.unready
                row.unready, row.computed = max(0, row.unready - 1), row.computed - 1
                continue
            token = next_token(self.model, row.states[-1], row.params)
            row.tokens.append(token)
            row.states.append(next_state(row.states[-1], token))
            code = finish_code(token, len(row.tokens), row.prompt_length, self.model, row.params)
            row.decodes = True
            row.unready = int(bool(bound) and len(row.tokens) % 3 == 0)
            row.finished = code is not FinishCode.CONTINUE
            tokens.append(token)
            codes.append(code)
        return Result(
            epoch=self.epoch,
            iteration=self.iteration,
            tokens=np.array(tokens, np.int32),
            finish=np.array(codes, np.uint8),
            logprobs=self._logprobs(slots, tokens, codes),
            prompt_logprobs=scores,
        )

    def _logprobs(self, slots: list[int], tokens: list[int], codes: list[FinishCode]) -> LogprobColumns:
        drawn = [i for i, code in enumerate(codes) if code < FinishCode.NOT_READY]
        rows = [i for i in drawn if self.rows[slots[i]].params.logprobs >= 0]
        if not rows:
            return LogprobColumns()
        entries = [_entries(tokens[i], self.rows[slots[i]].params.logprobs) for i in rows]
        return LogprobColumns(
            rows=np.array(rows, np.uint16),
            widths=np.array([len(ids) for ids, _ in entries], np.uint16),
            token_ids=np.concatenate([ids for ids, _ in entries]),
            values=np.concatenate([values for _, values in entries]),
        )


def _entries(token: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Made-up logprobs: the token, then `count` others, with values that tell whose they are."""
    ids = np.array([token, *range(100, 100 + count)], np.int32)
    return ids, (-ids / 8).astype(np.float32)
