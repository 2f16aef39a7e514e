"""Batch state: plans are laid out flat, and advanced."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from common.wire import FinishCode, Plan
from executor_svc.batch import BatchState, Work
from tests.executor.plans import decode_plan, ids, new_sequence, prefill_plan, slots
from tests.executor.small_state import VOCABULARY, busy_state, make_state


def started(*new: Any) -> BatchState:
    """A state whose sequences have sampled one token each (50)."""
    state = make_state()
    work = state.apply(prefill_plan(1, *new))
    state.advance(work, np.full(len(new), 50))
    return state


def test_a_whole_prefill_is_laid_out() -> None:
    state = make_state()
    work = state.apply(prefill_plan(1, new_sequence(3, [9, 8, 7, 6, 5], [7, 2]), new_sequence(0, [4, 3], [5])))
    assert work.slots.tolist() == [3, 0]
    assert work.token_ids.tolist() == [9, 8, 7, 6, 5, 4, 3]
    assert work.positions.tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert work.kv_slots.tolist() == [28, 29, 30, 31, 8, 20, 21]
    assert work.query_start.tolist() == [0, 5, 7]
    assert work.context_lens.tolist() == [5, 2]
    assert state.tables_of(work).tolist()[0] == [7, 2]
    assert state.tables_of(work).tolist()[1][0] == 5
    assert (work.num_decodes, work.max_query_len, work.max_context_len) == (0, 5, 5)
    assert work.sample_rows.tolist() == [0, 1] and work.sample_slots.tolist() == [3, 0]
    assert work.logit_rows.tolist() == [4, 6]


def test_chunks_sample_only_at_the_end_of_the_known_tokens() -> None:
    state = make_state()
    new = new_sequence(2, list(range(10, 20)), [1, 2, 3])
    work = state.apply(Plan(1, 1, prefills=slots(2), prefill_lengths=ids(7), new=(new,)))
    assert work.positions.tolist() == list(range(7)) and len(work.sample_rows) == 0
    assert len(state.advance(work, np.empty(0, np.int64))) == 0
    work = state.apply(Plan(1, 2, prefills=slots(2), prefill_lengths=ids(3)))
    assert work.positions.tolist() == [7, 8, 9] and work.logit_rows.tolist() == [2]
    assert work.token_ids.tolist() == [17, 18, 19]
    state.advance(work, np.array([42]))
    work = state.apply(decode_plan(3, 2))
    assert work.token_ids.tolist() == [42] and work.positions.tolist() == [10]
    assert work.kv_slots.tolist() == [3 * 4 + 2]


def test_decodes_come_before_prefills_in_plan_order() -> None:
    state = started(new_sequence(0, [5, 6], [0]), new_sequence(1, [7], [1]))
    new = (new_sequence(4, [11, 12, 13], [4]),)
    work = state.apply(Plan(1, 2, decodes=slots(1, 0), prefills=slots(4), prefill_lengths=ids(3), new=new))
    assert work.slots.tolist() == [1, 0, 4] and work.num_decodes == 2
    assert work.token_ids.tolist() == [50, 50, 11, 12, 13]
    assert work.positions.tolist() == [1, 2, 0, 1, 2]
    assert work.query_start.tolist() == [0, 1, 2, 5]
    assert work.sample_slots.tolist() == [1, 0, 4]


def test_a_prefix_hit_is_not_computed_again() -> None:
    state = make_state()
    work = state.apply(prefill_plan(1, new_sequence(0, list(range(10, 19)), [3, 9, 1], computed=8)))
    assert work.positions.tolist() == [8] and work.kv_slots.tolist() == [4]
    assert work.context_lens.tolist() == [9] and state.tables_of(work).tolist() == [[3, 9, 1]]


def test_a_resumed_sequence_goes_on_where_it_was() -> None:
    state = make_state()
    resumed = new_sequence(0, [5, 6, 7, 8], [3], prompt_length=2, max_tokens=4)
    work = state.apply(prefill_plan(1, resumed))
    assert work.sample_slots.tolist() == [0] and work.logit_rows.tolist() == [3]
    assert state.advance(work, np.array([9])).tolist() == [FinishCode.CONTINUE]
    work = state.apply(decode_plan(2, 0, appended_slots=slots(0), appended_blocks=ids(4)))
    assert (work.token_ids.tolist(), work.positions.tolist(), work.kv_slots.tolist()) == ([9], [4], [16])
    assert state.advance(work, np.array([9])).tolist() == [FinishCode.LENGTH]


def test_appended_blocks_go_to_the_end_in_order() -> None:
    state = started(new_sequence(0, [5] * 4, [3]), new_sequence(1, [5] * 8, [8, 9]))
    plan = decode_plan(2, 0, 1, appended_slots=slots(0, 1, 0, 1), appended_blocks=ids(20, 21, 22, 23))
    state.apply(plan)
    assert state.block_tables[0, :3].tolist() == [3, 20, 22]
    assert state.block_tables[1, :4].tolist() == [8, 9, 21, 23]
    assert state.columns.num_blocks[:2].tolist() == [3, 4]


def test_a_freed_slot_is_taken_in_the_same_plan() -> None:
    first = new_sequence(0, [5, 6], [0], stop_token_ids=ids(7), bias_ids=ids(3), bias_values=np.ones(1, np.float32))
    state = started(first)
    new = new_sequence(0, [9], [0], generation=2)
    work = state.apply(prefill_plan(2, new, freed=slots(0)))
    assert work.token_ids.tolist() == [9]
    assert not state.has_bias[0] and len(state.stop_keys) == 0
    assert state.advance(work, np.array([7])).tolist() == [FinishCode.CONTINUE]


def finish_of(token: int, generated: int = 1, **params: Any) -> FinishCode:
    """Code of the `generated`-th token."""
    state = make_state()
    tokens = [5, 6] + [50] * (generated - 1)
    work = state.apply(prefill_plan(1, new_sequence(0, tokens, list(range(10)), prompt_length=2, **params)))
    return FinishCode(int(state.advance(work, np.array([token]))[0]))


def test_finish_codes() -> None:
    assert finish_of(50) is FinishCode.CONTINUE
    assert finish_of(0) is FinishCode.EOS
    assert finish_of(1) is FinishCode.EOS
    assert finish_of(1, ignore_eos=True) is FinishCode.CONTINUE
    assert finish_of(50, stop_token_ids=ids(51, 50)) is FinishCode.STOP_TOKEN
    assert finish_of(1, ignore_eos=True, stop_token_ids=ids(1)) is FinishCode.STOP_TOKEN
    assert finish_of(50, max_tokens=1) is FinishCode.LENGTH
    assert finish_of(50, generated=2, max_tokens=3) is FinishCode.CONTINUE
    assert finish_of(50, generated=3, max_tokens=3) is FinishCode.LENGTH
    assert finish_of(0, generated=3, max_tokens=3) is FinishCode.EOS
    assert finish_of(50, generated=3, max_tokens=3, stop_token_ids=ids(50)) is FinishCode.STOP_TOKEN
    assert finish_of(1, generated=3, max_tokens=3, ignore_eos=True) is FinishCode.LENGTH
    assert finish_of(50, generated=37, max_tokens=1000) is FinishCode.CONTINUE
    assert finish_of(50, generated=38, max_tokens=1000) is FinishCode.LENGTH  # 40 tokens: the model's context


def test_stop_tokens_are_each_sequence_s_own() -> None:
    new = (new_sequence(0, [5], [0], stop_token_ids=ids(60)), new_sequence(1, [5], [1], stop_token_ids=ids(61, 99)))
    state = make_state()
    work = state.apply(prefill_plan(1, *new, new_sequence(2, [5], [2])))
    assert state.advance(work, np.array([61, 60, 60])).tolist() == [0, 0, 0]
    work = state.apply(decode_plan(2, 0, 1, 2))
    stop = int(FinishCode.STOP_TOKEN)
    assert state.advance(work, np.array([60, 99, 61])).tolist() == [stop, stop, 0]


def test_prompt_logprob_rows() -> None:
    state = make_state()
    scored = new_sequence(0, [5, 6, 7, 8, 9], [0, 1], prompt_logprobs=0)
    plain = new_sequence(1, [5, 6], [2])
    single = new_sequence(2, [5], [3], prompt_logprobs=3)
    plan = Plan(1, 1, prefills=slots(2, 0, 1), prefill_lengths=ids(1, 2, 2), new=(scored, plain, single))
    work = state.apply(plan)
    assert work.prompt_rows.tolist() == [1]
    state.advance(work, np.array([50, 50]))
    work = state.apply(Plan(1, 2, decodes=slots(1, 2), prefills=slots(0), prefill_lengths=ids(3)))
    assert work.prompt_rows.tolist() == [2]
    state.advance(work, np.array([50, 50, 50]))
    assert len(state.apply(decode_plan(3, 0)).prompt_rows) == 0


def test_the_last_id_and_the_full_context_are_fine() -> None:
    state = make_state()
    work = state.apply(prefill_plan(1, new_sequence(5, [VOCABULARY - 1] * 40, list(range(22, 32)))))
    assert state.advance(work, np.array([VOCABULARY - 1])).tolist() == [FinishCode.LENGTH]


def test_a_plan_without_work() -> None:
    state = busy_state()
    work = state.apply(Plan(1, 2, freed=slots(0)))
    assert len(work.slots) == len(work.token_ids) == work.max_query_len == 0
    assert len(state.advance(work, np.empty(0, np.int64))) == 0


def test_clear_forgets_all() -> None:
    state = busy_state()
    state.clear()
    assert state.apply(prefill_plan(1, new_sequence(0, [5], [0]))).slots.tolist() == [0]


class Reference:
    """The same mirror, written the plain way: lists by sequence."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.table: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}

    def expect(self, work: Work, plan: Plan, state: BatchState) -> None:
        block_size = state.block_size
        rows = [(s, 1) for s in plan.decodes.tolist()]
        rows += list(zip(plan.prefills.tolist(), plan.prefill_lengths.tolist(), strict=True))
        token_ids, positions, kv_slots, samples = [], [], [], []
        for slot, count in rows:
            start = self.computed[slot]
            for position in range(start, start + count):
                token_ids.append(self.tokens[slot][position])
                positions.append(position)
                kv_slots.append(self.table[slot][position // block_size] * block_size + position % block_size)
            self.computed[slot] = start + count
            if self.computed[slot] == len(self.tokens[slot]):
                samples.append(slot)
        assert work.token_ids.tolist() == token_ids
        assert work.positions.tolist() == positions
        assert work.kv_slots.tolist() == kv_slots
        assert work.sample_slots.tolist() == samples
        assert work.context_lens.tolist() == [self.computed[slot] for slot, _ in rows]
        for row, (slot, _) in enumerate(rows):
            width = -(-self.computed[slot] // block_size)
            assert state.tables_of(work)[row, :width].tolist() == self.table[slot][:width]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_run_of_good_plans_equals_the_plain_mirror(data: st.DataObject) -> None:
    block_size = data.draw(st.sampled_from([1, 3, 4]))
    state = make_state(block_size=block_size, num_blocks=200, max_num_batched_tokens=400)
    reference, generation, free_blocks = Reference(), [0] * 6, list(range(200))
    for iteration in range(1, data.draw(st.integers(1, 12)) + 1):
        freed = [s for s in reference.tokens if len(reference.tokens[s]) > 38 or data.draw(st.integers(0, 9)) == 0]
        for slot in freed:
            free_blocks += reference.table.pop(slot)
            del reference.tokens[slot], reference.computed[slot]
        new = []
        for slot in [s for s in range(6) if s not in reference.tokens and data.draw(st.booleans())]:
            tokens = data.draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=20))
            generation[slot] += data.draw(st.integers(1, 3))
            hit = data.draw(st.integers(0, (len(tokens) - 1) // block_size))
            table = [free_blocks.pop(0) for _ in range(-(-len(tokens) // block_size))]
            reference.tokens[slot], reference.table[slot] = tokens, table
            reference.computed[slot] = hit * block_size
            new.append(
                new_sequence(
                    slot, tokens, table, generation=generation[slot], computed=hit * block_size, ignore_eos=True
                )
            )
        decodes, prefills, lengths, appended = [], [], [], []
        for slot in data.draw(st.permutations(sorted(reference.tokens))):
            left = len(reference.tokens[slot]) - reference.computed[slot]
            if left == 1:
                decodes.append(slot)
                if reference.computed[slot] == len(reference.table[slot]) * block_size:
                    reference.table[slot].append(free_blocks.pop(0))
                    appended.append((slot, reference.table[slot][-1]))
            elif data.draw(st.booleans()):
                prefills.append(slot)
                lengths.append(data.draw(st.integers(1, left)))
        plan = Plan(
            epoch=1,
            iteration=iteration,
            decodes=slots(*decodes),
            prefills=slots(*prefills),
            prefill_lengths=ids(*lengths),
            new=tuple(new),
            freed=slots(*freed),
            appended_slots=slots(*(s for s, _ in appended)),
            appended_blocks=ids(*(b for _, b in appended)),
        )
        work = state.apply(plan)
        reference.expect(work, plan, state)
        sampled = np.array([data.draw(st.integers(0, VOCABULARY - 1)) for _ in work.sample_slots], np.int64)
        state.advance(work, sampled)
        for slot, token in zip(work.sample_slots.tolist(), sampled.tolist(), strict=True):
            reference.tokens[slot].append(token)


def test_a_temperature_too_small_to_divide_by_is_greedy() -> None:
    state = make_state()
    new = tuple(new_sequence(slot, [5], [slot], temperature=t) for slot, t in enumerate((1e-40, 9e-6, 1e-5, 1.0)))
    state.apply(Plan(1, 1, prefills=slots(0, 1, 2, 3), prefill_lengths=ids(1, 1, 1, 1), new=new))
    assert (state.temperature[:4] > 0).tolist() == [False, False, True, True]
