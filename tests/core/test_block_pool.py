"""KV blocks of a lane and the prefix index over them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.core.block_pool import BlockPool, extend_hashes
from tests.core.model_executor import card
from tests.core.world import World

TOKENS = np.arange(100, dtype=np.int32)


def chain(tokens: np.ndarray, count: int, *, size: int = 4, key: bytes = b"k") -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, tokens, size, key, count)
    return hashes


# --- hashes ---


def test_a_hash_is_128_bits_and_stands_for_the_whole_history() -> None:
    hashes = chain(TOKENS, 5)
    assert len(set(hashes)) == 5 and {len(digest) for digest in hashes} == {16}
    for place in range(20):
        changed = TOKENS.copy()
        changed[place] += 1
        other = chain(changed, 5)
        assert other[: place // 4] == hashes[: place // 4]
        assert all(one != two for one, two in zip(other[place // 4 :], hashes[place // 4 :], strict=True))


def test_hashes_are_keyed() -> None:
    assert not set(chain(TOKENS, 5)) & set(chain(TOKENS, 5, key=b"another"))


def test_roots_keep_chains_of_equal_tokens_apart() -> None:
    hashes: dict[bytes, list[bytes]] = {root: [] for root in (b"", b"salt", b"salt" * 40, chain(TOKENS, 1)[0])}
    for root, own in hashes.items():
        for count in (2, 5):
            extend_hashes(own, TOKENS, 4, b"k", count, root)
    assert len({digest for own in hashes.values() for digest in own}) == 5 * len(hashes)
    assert hashes[b""] == chain(TOKENS, 5)


def test_no_root_begins_where_another_chain_goes_on() -> None:
    """Whoever knows a link must not be able to put other KV in the place of what follows it."""
    first, second = chain(TOKENS, 2)
    forged: list[bytes] = []
    extend_hashes(forged, TOKENS[4:], 4, b"k", 1, first)
    assert forged != [second]


def test_the_same_block_after_another_history_is_another_block() -> None:
    once = chain(np.array([1, 2, 3, 4] * 2, np.int32), 2)
    assert once[0] != once[1]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 25), max_size=8), st.sampled_from([1, 3, 4]))
def test_hashes_do_not_depend_on_the_steps_in_which_they_were_made(steps: list[int], size: int) -> None:
    hashes: list[bytes] = []
    for count in steps:
        extend_hashes(hashes, TOKENS, size, b"k", count)
    assert hashes == chain(TOKENS, max(steps, default=0), size=size)


def test_hashes_do_not_depend_on_the_layout_of_the_tokens() -> None:
    wide = np.zeros((3, 100), np.int32)
    wide[1] = TOKENS
    assert chain(wide[1], 5) == chain(TOKENS, 5) == chain(TOKENS[::-1].copy()[::-1], 5)


# --- pool ---


def published(pool: BlockPool, count: int, start: int = 0) -> tuple[list[int], list[bytes]]:
    """A table of full blocks, each to be found by its hash."""
    blocks, hashes = pool.allocate(count), chain(TOKENS[start:], count)
    for block, digest in zip(blocks, hashes, strict=True):
        pool.publish_many([block], [digest])
    return blocks, hashes


def test_blocks_are_handed_out_once() -> None:
    pool = BlockPool(8)
    first, second = pool.allocate(5), pool.allocate(3)
    assert sorted(first + second) == list(range(8)) and pool.num_available == 0
    with pytest.raises(ValueError, match="1 blocks wanted, 0 available"):
        pool.allocate(1)
    pool.release(first)
    pool.check_invariants([second])
    assert pool.num_available == 5 and pool.num_referenced == 3
    with pytest.raises(ValueError, match="6 blocks wanted"):
        pool.allocate(6)
    assert sorted(pool.allocate(5)) == sorted(first)


def test_a_large_pool_costs_nothing_until_it_is_used() -> None:
    pool = BlockPool(1 << 20)
    assert pool.allocate(3) == [0, 1, 2] and pool.num_available == (1 << 20) - 3


def test_a_release_too_many_is_found() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(blocks)


def test_invariants_find_a_wrong_table() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    for tables in ([], [[blocks[0]]], [blocks, blocks], [[3]]):
        with pytest.raises(AssertionError):
            pool.check_invariants(tables)


def test_the_longest_cached_beginning_is_found() -> None:
    pool = BlockPool(8)
    blocks, hashes = published(pool, 4)
    assert pool.lookup(hashes) == blocks
    assert pool.lookup([*hashes[:2], b"?" * 16, hashes[3]]) == blocks[:2]
    assert pool.lookup([b"?" * 16, *hashes]) == []
    pool.release(blocks)
    assert pool.lookup(hashes) == blocks and pool.num_available == 8


def test_shared_blocks_are_kept_until_the_last_holder_goes() -> None:
    pool = BlockPool(4)
    blocks, hashes = published(pool, 3)
    pool.share(blocks[:2])
    pool.release(blocks)
    pool.check_invariants([blocks[:2]])
    assert pool.num_available == 2, "the third block is evictable, one was never used"
    pool.allocate(2)
    assert pool.lookup(hashes) == blocks[:2]
    pool.release(blocks[:2])
    assert pool.num_available == 2


def test_sharing_an_evictable_block_takes_it_from_the_available_ones() -> None:
    pool = BlockPool(4)
    blocks, hashes = published(pool, 3)
    pool.release(blocks)
    hit = pool.lookup(hashes)
    assert pool.num_evictable(hit) == 3
    pool.share(hit)
    assert pool.num_available == 1 and pool.num_evictable(hit) == 0
    pool.check_invariants([hit])


def test_eviction_takes_the_least_recently_released_chain_and_its_tail_first() -> None:
    pool = BlockPool(6)
    old, old_hashes = published(pool, 3)
    new, new_hashes = published(pool, 3, start=50)
    pool.release(new)
    pool.release(old)
    pool.share(new)
    pool.release(new)  # used again: now the newest
    order = [pool.allocate(1)[0] for _ in range(6)]
    assert order == [*reversed(old), *reversed(new)]
    assert pool.lookup(old_hashes) == [] and pool.lookup(new_hashes) == [] and pool.num_cached == 0


def test_unpublished_blocks_are_used_before_cached_ones() -> None:
    pool = BlockPool(4)
    cached, hashes = published(pool, 2)
    plain = pool.allocate(2)
    pool.release(cached)
    pool.release(plain)
    assert sorted(pool.allocate(2)) == sorted(plain)
    assert pool.lookup(hashes) == cached


def test_of_two_copies_one_is_found_and_either_may_go() -> None:
    for first_to_go in (0, 1):
        pool = BlockPool(4)
        copies = [pool.allocate(1), pool.allocate(1)]
        for copy in copies:
            pool.publish_many([copy[0]], [b"same hash"])
        pool.release(copies[first_to_go])
        pool.check_invariants([copies[1 - first_to_go]])
        assert pool.lookup([b"same hash"]) == copies[0]
        pool.release(copies[1 - first_to_go])
        pool.check_invariants([])
        assert pool.num_available == 4 and pool.num_cached == 1


def test_publishing_again_changes_nothing() -> None:
    pool = BlockPool(4)
    (block,) = pool.allocate(1)
    pool.publish_many([block], [b"one"])
    pool.publish_many([block], [b"one"])
    pool.publish_many([block], [b"two"])
    assert pool.lookup([b"one"]) == [block] and pool.lookup([b"two"]) == []


def test_what_would_fit_after_a_release() -> None:
    pool = BlockPool(6)
    shared, hashes = published(pool, 2)
    pool.share(shared)
    own = pool.allocate(3)
    assert pool.fits(1) and not pool.fits(2)
    assert pool.fits(4, own) and not pool.fits(5, own)
    assert (
        not pool.fits(2, shared)
        and pool.fits(6, [*shared, *own, *shared])
        and not pool.fits(7, [*shared, *own, *shared])
    )
    pool.release(shared)
    pool.release(shared)
    assert pool.fits(3) and pool.lookup(hashes) == shared


def test_only_cached_blocks_can_be_shared() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(KeyError):
        pool.share(blocks)


# --- the index at work ---


def test_only_acknowledged_blocks_are_found() -> None:
    """A prefix of 3.5 blocks under a chunk of one block: each acknowledgement makes one more block usable."""
    world = World(max_prefill_chunk=4)
    lane = world.attach()
    world.submit(14, 4)
    for acknowledged in range(4):
        assert lane.pool.num_cached == min(acknowledged, 3)
        world.turn()
        assert lane.pool.num_cached == min(acknowledged, 3), "published while in flight"
        world.deliver(world.lanes[0])


def test_a_whole_prompt_in_the_cache_leaves_its_last_block_to_compute() -> None:
    world = World()
    world.attach()
    prompt = list(range(2, 10))
    world.submit(prompt, 1)
    world.run()
    (again,) = world.submit(prompt, 1)
    world.run()
    assert again.ended is not None and again.ended.cached_tokens == 4


def test_generated_tokens_are_found_again() -> None:
    """The next turn of a conversation begins with the last one's prompt and answer."""
    world = World()
    world.attach()
    (first,) = world.submit(6, 9, ignore_eos=True)
    world.run()
    (second,) = world.submit([*first.prompt, *first.tokens, 5], 3)
    world.run()
    assert len(first.tokens) == 9 and second.ended is not None
    assert second.ended.cached_tokens == 12, "of 15 tokens 14 have KV, which fill 3 blocks"


def test_an_aborted_prefill_leaves_only_what_was_computed() -> None:
    world = World(max_prefill_chunk=4)
    lane = world.attach()
    prompt = list(range(2, 22))
    (first,) = world.submit(prompt, 2)
    for _ in range(2):
        world.iterate()
    world.turn()
    world.abort(first)
    world.deliver(lane)
    assert lane.pool.num_cached == 3 and lane.pool.num_referenced == 0
    (second,) = world.submit(prompt, 2)
    world.run()
    assert second.ended is not None and second.ended.cached_tokens == 12


def test_without_prefix_caching_nothing_is_shared() -> None:
    world = World(prefix_caching=False)
    lane = world.attach()
    prompt = list(range(2, 22))
    for _ in range(2):
        (stream,) = world.submit(prompt, 2)
        world.run()
        assert stream.ended is not None and stream.ended.cached_tokens == 0 and lane.pool.num_cached == 0


def test_prompt_logprobs_need_the_whole_prompt_computed() -> None:
    world = World(max_prefill_chunk=5)
    world.attach()
    prompt = list(range(2, 22))
    world.submit(prompt, 2)
    world.run()
    (scored,) = world.submit(prompt, 2, prompt_logprobs=1)
    world.run()
    assert scored.ended is not None and scored.ended.cached_tokens == 0 and scored.scored == set(range(1, 20))


def test_another_model_finds_nothing_of_the_first() -> None:
    """C01: hashes are keyed with the model, and a pool ends with its epoch."""
    world = World()
    lane = world.attach()
    prompt = list(range(2, 22))
    world.submit(prompt, 2)
    world.run()
    for fingerprint in (b"weights", b"other weights"):
        world.lose(lane)
        lane = world.attach(model=replace(card(), fingerprint=fingerprint))
        (stream,) = world.submit(prompt, 2)
        world.run()
        assert stream.ended is not None and stream.ended.cached_tokens == 0
