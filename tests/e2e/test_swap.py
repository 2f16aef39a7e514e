"""Preemption by swapping: the KV of who gives way waits in the executor's host pool, and the answers are the same."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.prompts import TEXTS

VARIANTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 7, "top_p": 0.9},
    "penalised": {"frequency_penalty": 1.0, "repetition_penalty": 1.2},
}
MAX_TOKENS = 40
SMALL = ("--block-size", "8", "--num-blocks", "22", "--max-num-seqs", "6")
"""Room for about three of the six at their full length."""


def answers(stack: Any, fields: dict[str, Any]) -> list[Any]:
    """All six at once."""
    with ThreadPoolExecutor(len(TEXTS)) as pool:
        found = list(pool.map(lambda text: stack.complete(text, MAX_TOKENS, **fields).json()["choices"][0], TEXTS))
    stack.until_idle()
    return [(choice["text"], choice["finish_reason"]) for choice in found]


@pytest.fixture(scope="module")
def undisturbed(real_stack: Any) -> dict[str, list[Any]]:
    """On a pool with room for all."""
    found = {name: answers(real_stack, fields) for name, fields in VARIANTS.items()}
    assert real_stack.metric("vllm:num_preemptions_total") == 0
    return found


def swapped(stack: Any) -> tuple[float, float]:
    """Blocks moved so far, out and in."""
    text = stack.client.get("/metrics").text
    out, back = (re.search(rf'gilir_swapped_blocks_total{{direction="{way}"}} (\S+)', text) for way in ("out", "in"))
    assert out and back, "no gilir_swapped_blocks_total"
    return float(out[1]), float(back[1])


def test_answers_over_swaps_are_the_same(start: Callable[..., Any], undisturbed: dict[str, list[Any]]) -> None:
    stack = start("--preemption", "swap", "--admission", "immediate", "--no-prefix-caching")
    stack.real("small", *SMALL, "--num-host-blocks", "64")
    stack.ready()
    before = (0.0, 0.0)
    for variant, fields in VARIANTS.items():
        assert answers(stack, fields) == undisturbed[variant], variant
        now = swapped(stack)
        assert now[0] > before[0] and now[1] > before[1], f"{variant}: nothing was swapped"
        before = now
    assert now[0] == now[1], "whoever was swapped out came back, and nobody from elsewhere"
    assert stack.metric("gilir_recomputed_tokens_total") == 0


@pytest.mark.nightly
def test_what_the_host_pool_does_not_hold_is_recomputed(
    start: Callable[..., Any], undisturbed: dict[str, list[Any]]
) -> None:
    stack = start("--preemption", "swap", "--admission", "immediate")
    stack.real("small", *SMALL, "--num-host-blocks", "5")
    stack.ready()
    assert answers(stack, VARIANTS["seeded"]) == undisturbed["seeded"]
    assert swapped(stack)[0] > 0 and stack.metric("gilir_recomputed_tokens_total") > 0
