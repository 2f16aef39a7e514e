"""The scripted executor: its pseudo model, its script, and its failures on the wire."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from common.wire import Alive, Fault, FinishCode, Hello, Leaving, Limits, Plan, Reset, Result, SamplingParams, WireError
from executor_svc.fake import FakeExecutor
from executor_svc.fake_model import invented_card
from executor_svc.fake_runner import ScriptedRunner
from executor_svc.pseudo_model import expected_tokens, prefix_hashes
from executor_svc.script import Action, Forced, Script
from tests.executor.plans import decode_plan, ids, new_sequence, prefill_plan, slots
from tests.executor.scripted_scheduler import ScriptedScheduler

CARD = invented_card(vocab_size=300, max_model_len=128, eos_ids=(0, 1))
LIMITS = Limits(block_size=4, num_blocks=64, num_host_blocks=4, max_num_seqs=8, max_num_batched_tokens=256)
ALPHABET = np.arange(2, 300)
PROMPT = [17, 4, 250, 9, 9, 30, 7]


def make_runner(script: Script | None = None, **options: Any) -> ScriptedRunner:
    return ScriptedRunner(script or Script(), CARD, LIMITS, **options)


def run(runner: ScriptedRunner, plan: Plan) -> Result:
    result = runner.run(plan)
    assert isinstance(result, Result), result
    return result


def generate(runner: ScriptedRunner, slot: int, count: int, first_iteration: int = 2) -> list[int]:
    """Decode one slot alone, giving it blocks from 40 on."""
    tokens = []
    for i in range(count):
        state = runner.state
        full = state.computed[slot] == state.columns.num_blocks[slot] * state.block_size
        grown = {"appended_slots": slots(slot), "appended_blocks": ids(40 + i)} if full else {}
        tokens += run(runner, decode_plan(first_iteration + i, slot, **grown)).tokens.tolist()
    return tokens


def test_hashes_follow_their_recurrence() -> None:
    tokens, value, expected = [3, 0, 299, 5, 5], 0, []
    for token in tokens:
        value = (value * 0x9E3779B97F4A7C15 + token + 1) % 2**64
        expected.append(value)
    hashes = prefix_hashes(np.array(tokens))
    assert hashes.tolist() == expected
    assert prefix_hashes(np.array(tokens[2:]), hashes[1]).tolist() == expected[2:]


def test_the_pseudo_model_is_a_pure_function_of_the_history() -> None:
    runner = make_runner()
    first = run(runner, prefill_plan(1, new_sequence(0, PROMPT, [5, 2]))).tokens.tolist()
    tokens = first + generate(runner, 0, 9)
    assert tokens == expected_tokens(PROMPT, 10, ALPHABET, SamplingParams(max_tokens=64))
    assert len(set(tokens)) > 5 and runner.pseudo.num_corrupt == 0


@pytest.mark.parametrize("chunk", [1, 2, 3, 7])
def test_chunks_make_no_difference(chunk: int) -> None:
    runner = make_runner()
    plan = Plan(1, 1, prefills=slots(3), prefill_lengths=ids(chunk), new=(new_sequence(3, PROMPT, [9, 1]),))
    tokens = run(runner, plan).tokens.tolist()
    iteration = 2
    while not tokens:
        left = min(chunk, len(PROMPT) - int(runner.state.computed[3]))
        tokens = run(runner, Plan(1, iteration, prefills=slots(3), prefill_lengths=ids(left))).tokens.tolist()
        iteration += 1
    assert tokens == expected_tokens(PROMPT, 1, ALPHABET, SamplingParams(max_tokens=1))


def test_a_resumed_sequence_says_the_same() -> None:
    expected = expected_tokens(PROMPT, 6, ALPHABET, SamplingParams(max_tokens=64))
    resumed = new_sequence(1, PROMPT + expected[:3], [5, 2, 7], prompt_length=len(PROMPT))
    assert run(make_runner(), prefill_plan(1, resumed)).tokens.tolist() == expected[3:4]


def test_seeds_count_only_when_sampling() -> None:
    def first(**params: Any) -> int:
        return int(run(make_runner(), prefill_plan(1, new_sequence(0, PROMPT, [5, 2], **params))).tokens[0])

    assert first(temperature=0.0, seed=1) == first(temperature=0.0, seed=2**64 - 1)
    assert first(seed=1) == first(seed=1) != first(seed=2)
    params = SamplingParams(max_tokens=1, temperature=0.7, seed=2**64 - 1)
    assert first(temperature=0.7, seed=2**64 - 1) == expected_tokens(PROMPT, 1, ALPHABET, params)[0]


def test_a_prefix_hit_reads_the_shared_block() -> None:
    runner = make_runner()
    run(runner, prefill_plan(1, new_sequence(0, PROMPT, [5, 2])))
    other = [*PROMPT[:4], 99, 98]
    result = run(runner, prefill_plan(2, new_sequence(1, other, [5, 3], computed=4)))
    assert result.tokens.tolist() == expected_tokens(other, 1, ALPHABET, SamplingParams(max_tokens=1))
    assert runner.pseudo.num_corrupt == 0


@pytest.mark.parametrize("stale", [5, 6])
def test_a_stale_block_shows_in_the_tokens(stale: int) -> None:
    """Wherever in the context it is: block 6 is read by the hash chain, block 5 lies before it."""
    runner = make_runner()
    prompt = PROMPT + PROMPT[::-1]
    run(runner, prefill_plan(1, new_sequence(0, prompt, [5, 6, 7, 8])))
    runner.pseudo.kv.reshape(-1, 4)[stale] = 0
    newcomer = new_sequence(1, prompt, [5, 6, 9, 10], computed=8)
    result = run(runner, prefill_plan(2, newcomer))
    assert result.tokens.tolist() != expected_tokens(prompt, 1, ALPHABET, SamplingParams(max_tokens=1))
    assert runner.pseudo.num_corrupt == 1


def test_copies_and_swaps_move_what_the_blocks_hold() -> None:
    runner = make_runner()
    run(runner, prefill_plan(1, new_sequence(0, PROMPT, [5, 2])))
    run(runner, Plan(1, 2, freed=slots(0), swap_outs=ids(5, 3, 2, 0)))
    runner.pseudo.kv[:] = 0
    moved = new_sequence(1, [*PROMPT, 11], [20, 21], computed=7)
    result = run(runner, prefill_plan(3, moved, swap_ins=ids(3, 8, 0, 21), copies=ids(8, 20)))
    assert result.tokens.tolist() == expected_tokens([*PROMPT, 11], 1, ALPHABET, SamplingParams(max_tokens=1))
    assert runner.pseudo.num_corrupt == 0


def test_forced_tokens_then_eos() -> None:
    script = Script(forced=(Forced((250, 9), (70, 71, 0)), Forced((), (80,))))
    runner = make_runner(script)
    new = (new_sequence(0, PROMPT, [0, 1, 3]), new_sequence(1, [9, 250], [2]))
    assert run(runner, prefill_plan(1, *new)).tokens.tolist() == [70, 80]
    result = run(runner, decode_plan(2, 0, 1))
    assert (result.tokens.tolist(), result.finish.tolist()) == ([71, 0], [0, 1])
    result = run(runner, decode_plan(3, 0))
    assert (result.tokens.tolist(), result.finish.tolist()) == ([0], [1])


def test_forced_tokens_follow_a_resumed_sequence() -> None:
    runner = make_runner(Script(forced=(Forced((), (70, 71, 72)),)))
    resumed = new_sequence(0, [*PROMPT, 70, 71], [0, 1, 2], prompt_length=len(PROMPT))
    assert run(runner, prefill_plan(1, resumed)).tokens.tolist() == [72]


def test_eos_after() -> None:
    runner = make_runner(Script(eos_after=1))
    new = (
        new_sequence(0, PROMPT, [0, 1]),
        new_sequence(1, PROMPT, [2, 3], min_tokens=2),
        new_sequence(2, PROMPT, [4, 5], ignore_eos=True),
    )
    run(runner, prefill_plan(1, *new))
    assert run(runner, decode_plan(2, 0, 1, 2)).finish.tolist() == [1, 0, 0]
    grown = {"appended_slots": slots(1, 2), "appended_blocks": ids(8, 9)}
    assert run(runner, decode_plan(3, 1, 2, **grown)).finish.tolist() == [1, 0]


def test_choose_sees_the_known_tokens() -> None:
    seen = []

    def choose(tokens: Any, prompt_length: int, params: SamplingParams) -> int:
        seen.append((tokens.tolist(), prompt_length, params.max_tokens))
        return 33

    runner = make_runner(Script(choose=choose))
    run(runner, prefill_plan(1, new_sequence(0, PROMPT, [0, 1], max_tokens=5)))
    assert run(runner, decode_plan(2, 0)).tokens.tolist() == [33]
    assert seen == [(PROMPT, 7, 5), ([*PROMPT, 33], 7, 5)]


def test_logprobs_have_their_shape() -> None:
    runner = make_runner()
    new = (
        new_sequence(0, PROMPT, [0, 1], logprobs=2, prompt_logprobs=1),
        new_sequence(1, PROMPT, [2, 3]),
        new_sequence(2, PROMPT, [4, 5], logprobs=0),
    )
    result = run(runner, prefill_plan(1, *new))
    logprobs = result.logprobs
    assert logprobs.rows.tolist() == [0, 2] and logprobs.widths.tolist() == [3, 1]
    assert logprobs.token_ids[0] == result.tokens[0] and logprobs.token_ids[3] == result.tokens[2]
    (prompt,) = result.prompt_logprobs
    assert (prompt.slot, prompt.start, prompt.widths.tolist()) == (0, 1, [2] * 6)
    assert prompt.token_ids[::2].tolist() == PROMPT[1:]


def test_minus_infinity_can_be_told() -> None:
    runner = make_runner(Script(chosen_logprob=float("-inf")))
    result = run(runner, prefill_plan(1, new_sequence(0, PROMPT, [0, 1], logprobs=0)))
    assert result.logprobs.values.tolist() == [float("-inf")]


def test_poison_names_its_slot() -> None:
    for named in (True, False):
        runner = make_runner(Script(poison_token=250, name_poisoned=named))
        run(runner, prefill_plan(1, new_sequence(0, [5, 6], [9])))
        fault = runner.run(prefill_plan(2, new_sequence(4, PROMPT, [0, 1])))
        assert isinstance(fault, Fault) and fault.slots.tolist() == ([4] if named else [])


def test_a_bad_plan_is_a_fault() -> None:
    fault = make_runner().run(decode_plan(1, 3))
    assert isinstance(fault, Fault)
    assert (fault.reason, fault.slots.tolist()) == ("plan", [3]) and "slot not in use" in fault.message


def test_script_from_json() -> None:
    script = Script.from_json(
        json.dumps(
            {
                "forced": [{"marker": [1, 2], "tokens": [3]}],
                "eos_after": 4,
                "delay_s": 0.5,
                "actions": {"3": "die_before"},
                "poison_token": 9,
                "poison_action": "die_after",
            }
        )
    )
    assert script.forced == (Forced((1, 2), (3,)),) and script.actions == {3: Action.DIE_BEFORE}
    assert (script.eos_after, script.delay_s, script.poison_action) == (4, 0.5, Action.DIE_AFTER)


@pytest.mark.parametrize("text", ["[]", '{"choose": 1}', '{"typo": 1}', '{"actions": {"1": "explode"}}', "{"])
def test_a_wrong_script_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Script.from_json(text)


# --- on the wire ---


def admit(scheduler: ScriptedScheduler, fake: FakeExecutor) -> None:
    scheduler.welcome(1)
    fake.wait_attached()
    scheduler.send(prefill_plan(1, new_sequence(0, PROMPT, [0])))


def test_junk_before_the_result(scheduler: ScriptedScheduler) -> None:
    with FakeExecutor(scheduler.address, Script(actions={1: Action.JUNK})) as fake:
        admit(scheduler, fake)
        with pytest.raises(WireError):
            scheduler.receive(Result)
        assert scheduler.receive(Result).iteration == 1


def test_a_result_twice(scheduler: ScriptedScheduler) -> None:
    with FakeExecutor(scheduler.address, Script(actions={1: Action.DOUBLE})) as fake:
        admit(scheduler, fake)
        assert scheduler.receive(Result) == scheduler.receive(Result)


def test_a_result_under_a_wrong_epoch(scheduler: ScriptedScheduler) -> None:
    with FakeExecutor(scheduler.address, Script(actions={1: Action.WRONG_EPOCH})) as fake:
        admit(scheduler, fake)
        assert scheduler.receive(Result).epoch != 1
        assert scheduler.receive(Result).epoch == 1


def test_impossible_results(scheduler: ScriptedScheduler) -> None:
    script = Script(actions={1: Action.SHORT, 2: Action.BAD_TOKEN})
    with FakeExecutor(scheduler.address, script) as fake:
        admit(scheduler, fake)
        assert len(scheduler.receive(Result).tokens) == 0
        scheduler.send(decode_plan(2, 0))
        assert scheduler.receive(Result).tokens[0] >= fake.model.vocab_size


def test_more_impossible_results(scheduler: ScriptedScheduler) -> None:
    script = Script(actions={1: Action.EXTRA, 2: Action.BAD_FINISH, 3: Action.STALE})
    with FakeExecutor(scheduler.address, script) as fake:
        admit(scheduler, fake)
        assert len(scheduler.receive(Result).tokens) == 2
        scheduler.send(decode_plan(2, 0))
        assert scheduler.receive(Result).finish[0] > max(FinishCode)
        scheduler.send(decode_plan(3, 0))
        assert [scheduler.receive(Result).iteration for _ in range(2)] == [2, 3]


def test_a_scripted_fault_then_reset(scheduler: ScriptedScheduler) -> None:
    with FakeExecutor(scheduler.address, Script(actions={1: Action.FAULT})) as fake:
        admit(scheduler, fake)
        assert scheduler.receive(Fault).reason == "scripted"
        scheduler.send(Reset(1, "fault"))
        scheduler.receive(Hello)


def test_hang_keeps_the_heartbeat_and_silence_does_not(scheduler: ScriptedScheduler) -> None:
    with FakeExecutor(scheduler.address, Script(actions={1: Action.HANG})) as fake:
        admit(scheduler, fake)
        fake.wait_plans(1)
        before = scheduler.num_alive
        scheduler.beat(lambda: scheduler.num_alive >= before + 5)
    with FakeExecutor(scheduler.address, Script(actions={1: Action.SILENCE})) as fake:
        admit(scheduler, fake)
        fake.wait_plans(1)
        scheduler.beat(lambda: fake.link._heartbeat is None)
        with pytest.raises(TimeoutError):
            while True:
                assert isinstance(scheduler.receive_any(0.3)[1], Alive | Hello)


def test_hold_and_release(scheduler: ScriptedScheduler) -> None:
    with FakeExecutor(scheduler.address) as fake:
        fake.hold()
        admit(scheduler, fake)
        assert fake.wait_plans(1)[0].iteration == 1
        with pytest.raises(TimeoutError):
            scheduler.receive_any(0.1)
        fake.release(1)
        scheduler.receive(Result)
        scheduler.send(decode_plan(2, 0))
        fake.wait_plans(2)
        with pytest.raises(TimeoutError):
            scheduler.receive_any(0.1)
        fake.release()
        assert scheduler.receive(Result).iteration == 2


def test_a_delay_is_not_a_sleep_that_death_must_wait_for(scheduler: ScriptedScheduler) -> None:
    with FakeExecutor(scheduler.address, Script(delay_s=600)) as fake:
        admit(scheduler, fake)
        fake.wait_plans(1)
    assert not fake.is_running


def test_raw_frames(scheduler: ScriptedScheduler) -> None:
    with FakeExecutor(scheduler.address) as fake:
        admit(scheduler, fake)
        scheduler.receive(Result)
        fake.send_raw(b"one", b"two")
        scheduler.router.poll(10_000)
        while (frames := scheduler.router.recv_multipart())[1:] != [b"one", b"two"]:
            assert len(frames) == 2


def test_stop_leaves(scheduler: ScriptedScheduler) -> None:
    with FakeExecutor(scheduler.address, grace_s=0.0) as fake:
        admit(scheduler, fake)
        scheduler.receive(Result)
        fake.stop()
        assert scheduler.receive(Leaving).epoch == 1
        assert fake.error is None
