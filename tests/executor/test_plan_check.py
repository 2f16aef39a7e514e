"""Plans that cannot be run are refused whole: nothing has changed, and the guilty rows are named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.wire import Constraint, Language, Plan
from executor_svc.batch import BatchState, PlanError
from tests.executor.plans import decode_plan, ids, new_sequence, prefill_plan, slots
from tests.executor.small_state import VOCABULARY, busy_state, make_state


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


def bad(name: str, plan: Plan, guilty: list[int] | None = None) -> Any:
    return pytest.param(plan, guilty, id=name)


def one(**fields: Any) -> Plan:
    """Slot 2 is free in the state under test, its last generation 0."""
    values: dict[str, Any] = {"slot": 2, "tokens": [5, 6, 7], "blocks": [9]} | fields
    return prefill_plan(2, new_sequence(**values))


def thinking(end: int, start: int) -> Constraint:
    return Constraint(Language.REGEX, "a", reasoning_end=end, reasoning_start=start)


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
    bad("end of reasoning at the end of the vocabulary", one(constraint=thinking(VOCABULARY, -1)), [2]),
    bad("start of reasoning at the end of the vocabulary", one(constraint=thinking(5, VOCABULARY)), [2]),
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
    bad("swap out to a negative block", decode_plan(2, 0, swap_outs=ids(1, -1))),
    bad("swap out from beyond the pool", decode_plan(2, 0, swap_outs=ids(32, 1))),
    bad("swap out from a negative block", decode_plan(2, 0, swap_outs=ids(-1, 1))),
    bad("two swap-outs to one block", decode_plan(2, 0, swap_outs=ids(9, 3, 10, 3))),
    bad("odd swap-outs", decode_plan(2, 0, swap_outs=ids(1, 1, 2))),
    bad("swap in from beyond the host pool", decode_plan(2, 0, swap_ins=ids(4, 1))),
    bad("swap in from a negative block", decode_plan(2, 0, swap_ins=ids(-1, 1))),
    bad("swap in beyond the pool", decode_plan(2, 0, swap_ins=ids(1, 32))),
    bad("swap in to a negative block", decode_plan(2, 0, swap_ins=ids(1, -1))),
    bad("two swap-ins to one block", decode_plan(2, 0, swap_ins=ids(2, 9, 3, 9))),
    bad("odd swap-ins", decode_plan(2, 0, swap_ins=ids(1))),
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
        swap_outs=ids(*columns(small, 2 * data.draw(st.integers(0, 2)))),
        swap_ins=ids(*columns(small, 2 * data.draw(st.integers(0, 2)))),
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
