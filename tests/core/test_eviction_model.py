"""The block pool beside a plain model of it, under every policy of eviction."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from common.wire import Retention
from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.config import Eviction


@dataclass
class Entry:
    """What the model knows of one cached content."""

    number: int
    weight: int
    holders: int = 1
    released: int = 0
    kept: bool = False


@dataclass
class Table:
    hashes: list[bytes]
    blocks: list[int]
    holds: list[bool]
    """Whether each block is the cached one of its content."""


@dataclass
class Model:
    """The same rules without any index: every question looks at everything."""

    num_blocks: int
    policy: Eviction
    entries: dict[bytes, Entry] = field(default_factory=dict)
    loose: int = 0
    """Held blocks that are not cached."""
    now: int = 0

    def order(self, digest: bytes) -> tuple[bool, int, int]:
        entry = self.entries[digest]
        return (entry.kept, 0 if self.policy is Eviction.LRU else entry.weight, entry.released)

    def evictable(self) -> list[bytes]:
        return sorted((digest for digest, entry in self.entries.items() if not entry.holders), key=self.order)

    def allocate(self, count: int) -> None:
        for _ in range(count):
            if len(self.entries) + self.loose == self.num_blocks:
                del self.entries[self.evictable()[0]]
            self.loose += 1

    def share(self, hashes: list[bytes]) -> None:
        for digest in hashes:
            self.entries[digest].holders += 1
            self.entries[digest].weight += self.policy is Eviction.LFU

    def publish(self, digest: bytes) -> bool:
        if digest in self.entries:
            return False
        self.now += 1
        self.entries[digest] = Entry(self.now, self.now if self.policy is Eviction.FIFO else 0)
        self.loose -= 1
        return True

    def release(self, table: Table, published: int, retention: Retention) -> None:
        weight, keep = 0, retention is Retention.KEEP
        for place in reversed(range(len(table.blocks))):
            digest = table.hashes[place]
            if place >= published:
                self.loose -= 1
                continue
            if not table.holds[place] and not self.publish(digest):
                self.loose -= 1
            else:
                self.entries[digest].holders -= 1
            entry = self.entries[digest]
            self.now += 1
            entry.released = self.now
            weight = entry.weight = max(weight, entry.weight)
            keep = entry.kept = keep or entry.kept
        marked = [digest for digest in self.evictable() if self.entries[digest].kept]
        for digest in marked[: max(0, len(marked) - self.num_blocks // 2)]:
            self.now += 1
            self.entries[digest].kept, self.entries[digest].released = False, self.now


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(Eviction), st.integers(1, 14), st.data())
def test_the_pool_does_what_a_plain_model_does(policy: Eviction, num_blocks: int, data: st.DataObject) -> None:
    pool, model = BlockPool(num_blocks, policy), Model(num_blocks, policy)
    tables: list[tuple[Table, int]] = []
    for _ in range(data.draw(st.integers(1, 25))):
        step = data.draw(st.sampled_from(["seat", "seat", "publish", "release"]))
        if step == "seat":
            chain = data.draw(st.text("ab", min_size=1, max_size=5))
            hashes = [chain[: end + 1].encode() for end in range(len(chain))]
            hit = pool.lookup(hashes[:-1])
            needed = len(hashes) - len(hit)
            if not pool.fits(needed + pool.num_evictable(hit)):
                continue
            pool.share(hit)
            model.share(hashes[: len(hit)])
            blocks = hit + pool.allocate(needed)
            model.allocate(needed)
            holds = [True] * len(hit) + [False] * needed
            tables.append((Table(hashes, blocks, holds), len(hit)))
        elif tables:
            place = data.draw(st.integers(0, len(tables) - 1))
            table, published = tables[place]
            if step == "publish":
                count = data.draw(st.integers(published, len(table.blocks)))
                pool.publish_many(table.blocks[published:count], table.hashes[published:count])
                for i in range(published, count):
                    table.holds[i] = model.publish(table.hashes[i])
                tables[place] = (table, count)
            else:
                retention = data.draw(st.sampled_from(Retention))
                pool.release(table.blocks, retention)
                model.release(table, published, retention)
                del tables[place]
        pool.check_invariants(table.blocks for table, _ in tables)
        check_alike(pool, model)


def check_alike(pool: BlockPool, model: Model) -> None:
    assert pool.num_cached == len(model.entries) and all(pool.lookup([digest]) for digest in model.entries)
    evictable = model.evictable()
    assert pool.num_available == pool.num_blocks - model.loose - len(model.entries) + len(evictable)
    assert pool.num_evictable(pool.lookup([digest])[0] for digest in evictable) == len(evictable)
    assert all(digest[:-1] in model.entries for digest in evictable if len(digest) > 1), "evictable but never found"
