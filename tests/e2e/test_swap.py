"""Preemption by swapping: the KV of who gives way waits in the executor's host pool, and the answers are the same."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

TEXTS = [
    "In the beginning",
    "The king said to his servants, and they",
    "Now there was a man",
    "And she answered",
    "They went up into the mountain, and when evening had come they",
    "Listen, my son",
]
VARIANTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 7, "top_p": 0.9},
    "penalised": {"frequency_penalty": 1.0, "repetition_penalty": 1.2},
}
SMALL = ("--block-size", "8", "--num-blocks", "30", "--max-num-seqs", "6")
"""Room for about three of the six at their full length."""


def answers(stack: Any, fields: dict[str, Any], at_once: int) -> list[Any]:
    with ThreadPoolExecutor(at_once) as pool:
        found = list(pool.map(lambda text: stack.complete(text, 64, **fields).json()["choices"][0], TEXTS))
    stack.until_idle()
    return [(choice["text"], choice["finish_reason"]) for choice in found]


@pytest.fixture(scope="module")
def undisturbed(real_stack: Any) -> dict[str, list[Any]]:
    """Each request by itself on a large pool."""
    return {name: answers(real_stack, fields, at_once=1) for name, fields in VARIANTS.items()}


def swapped(stack: Any) -> dict[str, float]:
    """Blocks moved so far, by direction."""
    lines = [line for line in stack.client.get("/metrics").text.splitlines() if "gilir_swapped_blocks_total{" in line]
    return {line.split('direction="')[1].split('"')[0]: float(line.split()[-1]) for line in lines}


def test_answers_over_swaps_are_the_same(start: Callable[..., Any], undisturbed: dict[str, list[Any]]) -> None:
    stack = start("--preemption", "swap", "--admission", "immediate", "--no-prefix-caching")
    stack.real("small", *SMALL, "--num-host-blocks", "64")
    stack.ready()
    before = {"out": 0.0, "in": 0.0}
    for variant, fields in VARIANTS.items():
        assert answers(stack, fields, at_once=6) == undisturbed[variant], variant
        now = swapped(stack)
        assert now["out"] > before["out"] and now["in"] > before["in"], f"{variant}: nothing was swapped"
        before = now
    assert stack.metric("vllm:num_preemptions_total") >= len(VARIANTS)
    assert stack.metric("gilir_recomputed_tokens_total") == 0


@pytest.mark.parametrize("host_blocks", [0, 6])
def test_a_host_pool_that_is_full_or_missing_means_recomputing(
    start: Callable[..., Any], undisturbed: dict[str, list[Any]], host_blocks: int
) -> None:
    stack = start("--preemption", "swap", "--admission", "immediate")
    stack.real("small", *SMALL, "--num-host-blocks", str(host_blocks))
    stack.ready()
    assert answers(stack, VARIANTS["seeded"], at_once=6) == undisturbed["seeded"]
    assert stack.metric("vllm:num_preemptions_total") >= 1
    assert stack.metric("gilir_recomputed_tokens_total") > 0
    assert max(swapped(stack).values(), default=0) <= 6 * stack.metric("vllm:num_preemptions_total") * bool(host_blocks)
