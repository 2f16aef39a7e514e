"""Rounds follow from their seeds, and between them they try everything."""

from __future__ import annotations

from tests.chaos.schedule import ACTIONS, BLOWS, KINDS, POISON, Kind, plan_round


def test_a_seed_gives_one_round() -> None:
    assert plan_round(7) == plan_round(7)
    assert plan_round(7) != plan_round(8)


def test_only_poisoned_prompts_hold_the_poison() -> None:
    asks = [ask for seed in range(300) for ask in plan_round(seed).asks]
    assert any(ask.poisoned for ask in asks)
    for ask in asks:
        prompt = ask.body.get("prompt", ())
        assert (not isinstance(prompt, str) and POISON in prompt) == ask.poisoned


def test_every_disturbance_and_action_comes_up() -> None:
    deeds = [deed for seed in range(1000) for deed in plan_round(seed).disturbances]
    assert {deed.kind for deed in deeds} == {*KINDS, Kind.HOLD, Kind.TERM_SCHEDULER, Kind.KILL_SCHEDULER}
    assert {deed.action for deed in deeds if deed.action} == set(ACTIONS)
    struck = {(deed.blow, deed.at_target) for deed in deeds if deed.kind is Kind.STRIKE}
    assert struck == {(blow, at_target) for blow in BLOWS for at_target in (False, True)}


def test_answers_are_a_function_of_the_request() -> None:
    """Or there would be nothing to compare with."""
    for seed in range(200):
        for ask in plan_round(seed).asks:
            assert ask.body["temperature"] == 0 or "seed" in ask.body
