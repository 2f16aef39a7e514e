"""Which cached blocks go first: policies and retention, by example."""

from __future__ import annotations

import random

import pytest

from common.wire import Retention
from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.config import Eviction
from scheduler_svc.core.eviction import WeightOrder

POLICIES = list(Eviction)


def digests(chain: str) -> list[bytes]:
    """One block a letter; its hash is the history up to it."""
    return [chain[: end + 1].encode() for end in range(len(chain))]


def seat(pool: BlockPool, chain: str) -> list[int]:
    """A table for a chain, with its beginning from the cache and the rest published."""
    hashes = digests(chain)
    hit = pool.lookup(hashes)
    pool.share(hit)
    table = hit + pool.allocate(len(chain) - len(hit))
    pool.publish_many(table[len(hit) :], hashes[len(hit) :])
    return table


def run(pool: BlockPool, *chains: str, retention: Retention = Retention.NORMAL) -> None:
    """One sequence after another."""
    for chain in chains:
        pool.release(seat(pool, chain), retention)


def cached(pool: BlockPool, *chains: str) -> set[str]:
    """The chains whose last block is found, with all before it."""
    return {chain for chain in chains if len(pool.lookup(digests(chain))) == len(chain)}


def evict(pool: BlockPool, count: int) -> None:
    pool.release(pool.allocate(pool.num_available - pool.num_cached + count))


def eviction_order(pool: BlockPool, *chains: str) -> str:
    """The chains' ends in the order in which they go, as text."""
    order, left = [], cached(pool, *chains)
    while left:
        pool.allocate(1)
        now = cached(pool, *chains)
        order += sorted(left - now)
        left = now
    return " ".join(order)


# --- policies ---


def test_lru_evicts_what_was_released_longest_ago() -> None:
    pool = BlockPool(3, Eviction.LRU)
    run(pool, "a", "b", "c", "a")
    assert eviction_order(pool, "a", "b", "c") == "b c a"


def test_lfu_evicts_what_was_shared_least_often() -> None:
    pool = BlockPool(4, Eviction.LFU)
    run(pool, "a", "a", "a", "b", "c", "d", "d", "c", "c", "b")
    assert eviction_order(pool, "a", "b", "c", "d") == "d b a c"


def test_a_block_of_another_content_starts_with_no_shares() -> None:
    pool = BlockPool(2, Eviction.LFU)
    run(pool, "a", "a", "a", "b", "b", "b", "b")
    pool.release(pool.allocate(1))
    run(pool, "c", "b", "d")
    assert cached(pool, "a", "b", "c", "d") == {"b", "d"}


def test_fifo_evicts_what_was_published_first_however_often_it_is_used() -> None:
    pool = BlockPool(3, Eviction.FIFO)
    run(pool, "a", "b", "c", "b", "a", "a")
    assert eviction_order(pool, "a", "b", "c") == "a b c"


def test_fifo_keeps_a_beginning_as_long_as_what_follows_it() -> None:
    pool = BlockPool(5, Eviction.FIFO)
    run(pool, "pa", "x", "pb", "y")
    assert eviction_order(pool, "p", "pa", "pb", "x", "y") == "pa x pb p y"


@pytest.mark.parametrize("policy", POLICIES)
def test_the_end_of_a_chain_goes_before_its_beginning(policy: Eviction) -> None:
    pool = BlockPool(6, policy)
    run(pool, "abcd", "abxy", "ab", "a")
    assert cached(pool, "abcd", "abxy") == {"abcd", "abxy"}
    for left in range(5, 0, -1):
        pool.allocate(1)
        reachable = cached(pool, "a", "ab", "abc", "abcd", "abx", "abxy")
        assert len(reachable) == left == pool.num_cached


@pytest.mark.parametrize("policy", POLICIES)
def test_a_copy_holds_the_beginning_of_its_chain(policy: Eviction) -> None:
    """Two prefills of one prompt side by side: the second table goes on from the first one's blocks."""
    pool = BlockPool(8, policy)
    first, second = pool.allocate(2), pool.allocate(3)
    pool.publish_many(first, digests("ab"))
    pool.publish_many(second, digests("abc"))
    pool.release(first)
    run(pool, "z")
    pool.release(second)
    pool.check_invariants([])
    order = eviction_order(pool, "a", "ab", "abc", "z").split()
    assert [chain for chain in order if chain != "z"] == ["abc", "ab", "a"]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_copy_takes_the_place_of_what_was_evicted(policy: Eviction) -> None:
    pool = BlockPool(5, policy)
    first, second = pool.allocate(2), pool.allocate(3)
    pool.publish_many(first, digests("ab"))
    pool.publish_many(second, digests("abc"))
    pool.release(first)
    other = pool.allocate(2)
    assert cached(pool, "a", "abc") == set()
    pool.release(second)
    assert cached(pool, "a", "ab", "abc") == {"a", "ab", "abc"}
    pool.check_invariants([other])


@pytest.mark.parametrize("policy", POLICIES)
def test_published_parts_of_a_table_in_any_order_of_calls(policy: Eviction) -> None:
    pool = BlockPool(8, policy)
    table, hashes = pool.allocate(5), digests("abcde")
    pool.publish_many(table[:2], hashes[:2])
    pool.publish_many([], [])
    pool.publish_many(table[2:], hashes[2:])
    pool.publish_many(table, hashes)
    assert pool.lookup(hashes) == table and pool.num_cached == 5


# --- retention ---


@pytest.mark.parametrize("policy", POLICIES)
def test_kept_blocks_go_after_all_others(policy: Eviction) -> None:
    pool = BlockPool(8, policy)
    run(pool, "ab", retention=Retention.KEEP)
    run(pool, "cd", "ef", "gh", "cd", "ef")
    evict(pool, 6)
    assert cached(pool, "ab", "c", "e", "g") == {"ab"}
    evict(pool, 1)
    assert cached(pool, "a", "ab") == {"a"}


@pytest.mark.parametrize("policy", POLICIES)
def test_kept_blocks_stay_kept_when_others_share_them(policy: Eviction) -> None:
    pool = BlockPool(8, policy)
    run(pool, "ab", retention=Retention.KEEP)
    run(pool, "abc", "xyz")
    evict(pool, 4)
    assert cached(pool, "ab", "abc", "x") == {"ab"}


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_held_is_marked_for_later(policy: Eviction) -> None:
    pool = BlockPool(4, policy)
    held = seat(pool, "a")
    run(pool, "a", retention=Retention.KEEP)
    pool.release(held)
    run(pool, "b", "c")
    evict(pool, 2)
    assert cached(pool, "a", "b", "c") == {"a"}


@pytest.mark.parametrize("policy", POLICIES)
def test_keeping_an_evictable_copy_moves_the_first_block(policy: Eviction) -> None:
    pool = BlockPool(4, policy)
    first, second = pool.allocate(1), pool.allocate(1)
    for table in (first, second):
        pool.publish_many(table, digests("a"))
    pool.release(first)
    pool.release(second, Retention.KEEP)
    pool.check_invariants([])
    run(pool, "b", "c")
    evict(pool, 2)
    assert cached(pool, "a", "b", "c") == {"a"}


@pytest.mark.parametrize("policy", POLICIES)
def test_at_most_half_of_the_pool_is_kept(policy: Eviction) -> None:
    pool = BlockPool(8, policy)
    run(pool, "abcdef", retention=Retention.KEEP)
    run(pool, "xy")
    evict(pool, 4)
    assert cached(pool, "abcd", "abcde", "x") == {"abcd"}, "the end gave way, as a normal block"
    run(pool, "mno", retention=Retention.KEEP)
    evict(pool, 3)
    assert cached(pool, "a", "ab", "mno") == {"a", "mno"}, "the oldest gave way to the newest"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_dropped_table_leaves_what_others_published(policy: Eviction) -> None:
    pool = BlockPool(4, policy)
    run(pool, "a")
    hit = pool.lookup(digests("a"))
    pool.share(hit)
    table = hit + pool.allocate(2)
    pool.release(table, Retention.DROP)
    pool.check_invariants([])
    assert cached(pool, "a") == {"a"} and pool.num_cached == 1 and pool.num_available == 4


# --- hit rates ---


def conversations(count: int, seed: int) -> list[str]:
    """Turns of conversations: a few system prompts of eight blocks, each turn three blocks longer than the last."""
    source = random.Random(seed)
    systems = [chr(0x100 + 8 * i) * 8 for i in range(4)]
    open_ones: list[str] = []
    turns = []
    for number in range(count):
        if open_ones and source.random() < 0.7:
            chain = open_ones.pop(source.randrange(max(0, len(open_ones) - 12), len(open_ones)))
        else:
            chain = source.choices(systems, weights=[8, 4, 2, 1])[0]
        turns.append(chain + 3 * chr(0x1000 + number))
        if len(turns[-1]) < 40:
            open_ones.append(turns[-1])
    return turns


def hit_rate(turns: list[str], policy: Eviction, num_blocks: int) -> float:
    pool = BlockPool(num_blocks, policy)
    hits = sum(hit_blocks(pool, chain) for chain in turns)
    return hits / sum(map(len, turns))


def hit_blocks(pool: BlockPool, chain: str) -> int:
    count = len(pool.lookup(digests(chain)))
    run(pool, chain)
    return count


@pytest.mark.parametrize(("policy", "share"), [(Eviction.LRU, 0.9), (Eviction.FIFO, 0.9), (Eviction.LFU, 0.7)])
def test_conversations_find_most_of_what_any_cache_could(policy: Eviction, share: float) -> None:
    """`lfu` holds on to old turns that were shared once, and loses some of the new ones."""
    turns = conversations(400, seed=1)
    best = hit_rate(turns, policy, 4000)
    assert best > 0.8 and hit_rate(turns, policy, 150) > share * best
    assert hit_rate(turns, policy, 60) > 0.5, "the beginnings stay"


def test_lfu_withstands_a_flood_of_single_prompts() -> None:
    """A system prompt is used again only after more strangers than the pool holds."""
    turns = ["abcdefgh" + letter for letter in "xyz"]
    for number in range(200):
        turns.append("abcdefgh" + 2 * chr(0x1000 + number))
        turns += [4 * chr(0x2000 + 10 * number + i) for i in range(10)]
    rates = {policy: hit_rate(turns, policy, 32) for policy in POLICIES}
    assert rates[Eviction.LFU] > 0.15 and rates[Eviction.LRU] < 0.01


def test_a_heap_of_stale_entries_is_cleaned() -> None:
    order = WeightOrder()
    for weight in range(1000):
        if weight:
            order.remove([7, 8])
        order.put([7, 8], [0] * 7 + [weight, 1000 - weight])
    assert len(order) == 2 and len(order._heap) <= 70
    assert order.pop(2) == [8, 7] and not list(order)
