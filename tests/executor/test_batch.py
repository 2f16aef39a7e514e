"""Batch state: plans are checked whole, laid out flat, and advanced."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.wire import FinishCode, Limits, Plan
from executor_svc.batch import BatchState, PlanError, Work
from tests.executor.plans import decode_plan, ids, new_sequence, prefill_plan, slots

VOCABULARY = 100
LIMITS = Limits(block_size=4, num_blocks=32, num_host_blocks=4, max_num_seqs=6, max_num_batched_tokens=64)


def make_state(**limits: Any) -> BatchState:
    values = {name: getattr(LIMITS, name) for name in LIMITS.__dataclass_fields__} | limits
    return BatchState(Limits(**values), max_model_len=40, vocab_size=VOCABULARY, eos_ids=(0, 1))


def started(*new: Any) -> BatchState:
    """A state whose sequences have sampled one token each (50)."""
    state = make_state()
    work = state.apply(prefill_plan(1, *new))
    state.advance(work, np.full(len(new), 50))
    return state


def snapshot(state: BatchState) -> dict[str, Any]:
    columns = state.columns
    found = {name: getattr(columns, name).copy() for name in columns.__slots__}
    live = np.flatnonzero(columns.live)
    found["tokens"] = [state.tokens[s, : columns.length[s]].copy() for s in live]
    found["tables"] = [state.block_tables[s, : columns.num_blocks[s]].copy() for s in live]
    found["params"] = list(state.params)
    found["stop_keys"] = state.stop_keys.copy()
    return found


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name, value in one.items():
        if isinstance(value, list):
            assert len(value) == len(other[name])
            assert all(np.array_equal(a, b) for a, b in zip(value, other[name], strict=True)), name
        else:
            np.testing.assert_array_equal(value, other[name], err_msg=name)


def test_a_whole_prefill_is_laid_out() -> None:
    state = make_state()
    work = state.apply(prefill_plan(1, new_sequence(3, [9, 8, 7, 6, 5], [7, 2]), new_sequence(0, [4, 3], [5])))
    assert work.slots.tolist() == [3, 0]
    assert work.token_ids.tolist() == [9, 8, 7, 6, 5, 4, 3]
    assert work.positions.tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert work.kv_slots.tolist() == [28, 29, 30, 31, 8, 20, 21]
    assert work.query_start.tolist() == [0, 5, 7]
    assert work.context_lens.tolist() == [5, 2]
    assert work.block_tables.tolist()[0] == [7, 2]
    assert work.block_tables.tolist()[1][0] == 5
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
    assert work.context_lens.tolist() == [9] and work.block_tables.tolist() == [[3, 9, 1]]


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


def bad(name: str, plan: Plan, guilty: list[int] | None = None) -> Any:
    return pytest.param(plan, guilty, id=name)


def one(**fields: Any) -> Plan:
    """Slot 2 is free in the state under test, its last generation 0."""
    values: dict[str, Any] = {"slot": 2, "tokens": [5, 6, 7], "blocks": [9]} | fields
    return prefill_plan(2, new_sequence(**values))


BAD_PLANS = [
    bad("decode of a free slot", decode_plan(2, 0, 2), [2]),
    bad("decode out of range", decode_plan(2, 0, 6)),
    bad("decode far out of range", decode_plan(2, 65_535)),
    bad("decode twice", decode_plan(2, 0, 0), [0]),
    bad("decode and prefill", decode_plan(2, 0, prefills=slots(0), prefill_lengths=ids(1)), [0]),
    bad("decode with more than one token left", decode_plan(2, 1), [1]),
    bad("decode of an ended sequence", decode_plan(2, 0, 3), [3]),
    bad("decode without a block for its position", decode_plan(2, 4), [4]),
    bad("chunk beyond the tokens", Plan(1, 2, prefills=slots(1), prefill_lengths=ids(6)), [1]),
    bad("empty chunk", Plan(1, 2, prefills=slots(1), prefill_lengths=ids(0)), [1]),
    bad("columns of different lengths", Plan(1, 2, prefills=slots(1), prefill_lengths=ids(1, 1))),
    bad("freed twice", Plan(1, 2, freed=slots(0, 0))),
    bad("freed a free slot", Plan(1, 2, freed=slots(2)), [2]),
    bad("freed out of range", Plan(1, 2, freed=slots(6))),
    bad("work on a freed slot", decode_plan(2, 0, freed=slots(0)), [0]),
    bad("new in a slot in use", one(slot=0, generation=2), [0]),
    bad("new out of range", one(slot=6)),
    bad("new twice", prefill_plan(2, new_sequence(2, [5], [9]), new_sequence(2, [6], [10], generation=2)), [2]),
    bad("generation does not rise", prefill_plan(2, new_sequence(0, [5], [0]), freed=slots(0)), [0]),
    bad("token at the end of the vocabulary", one(tokens=[5, VOCABULARY]), [2]),
    bad("negative token", one(tokens=[5, -1]), [2]),
    bad("no tokens", one(tokens=[], prompt_length=1), [2]),
    bad("too many tokens", one(tokens=[5] * 41, blocks=list(range(10, 20)), prompt_length=41), [2]),
    bad("prompt_length over the tokens", one(prompt_length=4), [2]),
    bad("nothing left to compute", one(computed=3), [2]),
    bad("computed beyond the blocks", one(tokens=[5] * 8, computed=7), [2]),
    bad("block out of range", one(blocks=[32]), [2]),
    bad("negative block", one(blocks=[-1]), [2]),
    bad("a block twice", one(blocks=[9, 9]), [2]),
    bad("too few blocks", one(tokens=[5] * 5), [2]),
    bad("too many blocks", one(blocks=list(range(9, 20))), [2]),
    bad("a block of another writer", prefill_plan(2, new_sequence(2, [5], [9]), new_sequence(5, [6], [9]))),
    bad(
        "a block of a decode",
        decode_plan(2, 0, prefills=slots(2), prefill_lengths=ids(1), new=(new_sequence(2, [5], [0]),)),
    ),
    bad("an appended block of a decode", decode_plan(2, 0, 4, appended_slots=slots(4), appended_blocks=ids(0))),
    bad("appended out of range", decode_plan(2, 0, appended_slots=slots(0), appended_blocks=ids(32))),
    bad("appended to a free slot", decode_plan(2, 0, appended_slots=slots(2), appended_blocks=ids(9)), [2]),
    bad("appended to no slot", decode_plan(2, 0, appended_slots=slots(6), appended_blocks=ids(9))),
    bad(
        "table over its end",
        decode_plan(2, 0, appended_slots=slots(*[0] * 10), appended_blocks=ids(*range(9, 19))),
        [0],
    ),
    bad("copy from out of range", decode_plan(2, 0, copies=ids(32, 1))),
    bad("copy to out of range", decode_plan(2, 0, copies=ids(1, -1))),
    bad("two copies to one block", decode_plan(2, 0, copies=ids(9, 11, 10, 11))),
    bad("a chain of copies", decode_plan(2, 0, copies=ids(9, 10, 10, 11))),
    bad("odd pairs", decode_plan(2, 0, copies=ids(1))),
    bad("swap out beyond the host pool", decode_plan(2, 0, swap_outs=ids(1, 4))),
    bad("swap in from beyond the host pool", decode_plan(2, 0, swap_ins=ids(4, 1))),
    bad("stop token outside the vocabulary", one(stop_token_ids=ids(VOCABULARY)), [2]),
    bad("bias outside the vocabulary", one(bias_ids=ids(VOCABULARY), bias_values=np.ones(1, np.float32)), [2]),
    bad("bias not finite", one(bias_ids=ids(1), bias_values=np.array([np.nan], np.float32)), [2]),
    bad("bias columns differ", one(bias_ids=ids(1), bias_values=np.ones(2, np.float32)), [2]),
    bad("max_tokens 0", one(max_tokens=0), [2]),
    bad("temperature nan", one(temperature=float("nan")), [2]),
    bad("temperature negative", one(temperature=-0.1), [2]),
    bad("top_p 0", one(top_p=0.0), [2]),
    bad("top_p above 1", one(top_p=1.1), [2]),
    bad("min_p above 1", one(min_p=1.1), [2]),
    bad("top_k negative", one(top_k=-1), [2]),
    bad("repetition_penalty 0", one(repetition_penalty=0.0), [2]),
    bad("presence_penalty infinite", one(presence_penalty=float("inf")), [2]),
]


def busy_state() -> BatchState:
    """0: decoding; 1: 5 of 10 tokens computed; 2: free; 3: ended; 4: at the end of its block; 5: free."""
    state = make_state()
    new = (
        new_sequence(0, [5, 6], [0]),
        new_sequence(1, list(range(10, 20)), [1, 2, 3]),
        new_sequence(3, [5], [4], max_tokens=1),
        new_sequence(4, [7] * 4, [5]),
    )
    work = state.apply(Plan(1, 1, prefills=slots(0, 1, 3, 4), prefill_lengths=ids(2, 5, 1, 4), new=new))
    assert state.advance(work, np.array([50, 51, 52])).tolist() == [0, FinishCode.LENGTH, 0]
    return state


@pytest.mark.parametrize(("plan", "guilty"), BAD_PLANS)
def test_a_bad_plan_changes_nothing(plan: Plan, guilty: list[int] | None) -> None:
    state = busy_state()
    before = snapshot(state)
    with pytest.raises(PlanError) as caught:
        state.apply(plan)
    assert_same(before, snapshot(state))
    assert caught.value.slots.tolist() == (guilty or [])
    assert state.apply(decode_plan(2, 0)).token_ids.tolist() == [50]


def test_more_tokens_than_the_limit() -> None:
    state = make_state(max_num_batched_tokens=5)
    with pytest.raises(PlanError, match="max_num_batched_tokens"):
        state.apply(prefill_plan(1, new_sequence(0, [5] * 6, [0, 1])))


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

    def expect(self, work: Work, plan: Plan, block_size: int) -> None:
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
            assert work.block_tables[row, :width].tolist() == self.table[slot][:width]


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
        reference.expect(work, plan, block_size)
        sampled = np.array([data.draw(st.integers(0, VOCABULARY - 1)) for _ in work.sample_slots], np.int64)
        state.advance(work, sampled)
        for slot, token in zip(work.sample_slots.tolist(), sampled.tolist(), strict=True):
            reference.tokens[slot].append(token)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_junk_plan_runs_or_is_refused(data: st.DataObject) -> None:
    """Whatever the integers, a plan either is laid out within all bounds or raises PlanError and changes nothing."""
    small = st.integers(-2, 40)
    slot_lists = st.lists(st.integers(0, 8), max_size=4)

    def columns(strategy: Any, count: int) -> list[int]:
        return data.draw(st.lists(strategy, min_size=count, max_size=count))

    prefills, appended = data.draw(slot_lists), data.draw(slot_lists)
    new = tuple(
        new_sequence(
            data.draw(st.integers(0, 7)),
            data.draw(st.lists(st.integers(-1, 105), max_size=6)),
            data.draw(st.lists(small, max_size=3)),
            generation=data.draw(st.integers(0, 2)),
            prompt_length=data.draw(st.integers(0, 7)),
            computed=data.draw(st.integers(-1, 7)),
            max_tokens=data.draw(st.integers(0, 3)),
        )
        for _ in range(data.draw(st.integers(0, 2)))
    )
    plan = Plan(
        epoch=1,
        iteration=2,
        decodes=slots(*data.draw(slot_lists)),
        prefills=slots(*prefills),
        prefill_lengths=ids(*columns(st.integers(-1, 8), len(prefills))),
        new=new,
        freed=slots(*data.draw(slot_lists)),
        appended_slots=slots(*appended),
        appended_blocks=ids(*columns(small, len(appended))),
        copies=ids(*columns(small, 2 * data.draw(st.integers(0, 2)))),
    )
    state = busy_state()
    before = snapshot(state)
    try:
        work = state.apply(plan)
    except PlanError:
        assert_same(before, snapshot(state))
        return
    assert (work.kv_slots >= 0).all() and (work.kv_slots < 32 * 4).all()
    assert len(set(work.kv_slots.tolist())) == len(work.kv_slots)
    assert (work.token_ids >= 0).all() and (work.token_ids < VOCABULARY).all()
    assert (work.context_lens <= state.length[work.slots]).all()
    state.advance(work, np.full(len(work.sample_rows), 50))
    assert (state.length <= 41).all()
