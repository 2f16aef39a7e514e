"""The scheduler's state for one attached executor: seats, columns by slot, block pool, and the iteration in flight."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from common.wire import Limits, ModelCard, NewSequence, Retention, TransferPoint
from scheduler_svc.core.block_pool import BlockPool, extend_hashes
from scheduler_svc.core.config import KvLayout, Preemption, SchedulerConfig
from scheduler_svc.core.host_pool import HostPool
from scheduler_svc.core.iteration import InFlight, PlanChanges
from scheduler_svc.core.kv_pool import KvPool
from scheduler_svc.core.pacing import Pace
from scheduler_svc.core.run_pool import RunPool
from scheduler_svc.core.sequence import Sequence, State, SwappedKv


class LaneError(Exception):
    """The executor answered something that cannot follow from its plan; its epoch must end."""


class Lane:
    """State of one attachment (epoch) of one executor. Numpy columns are indexed by slot."""

    def __init__(
        self,
        epoch: int,
        name: str,
        model: ModelCard,
        limits: Limits,
        config: SchedulerConfig,
        transfer: TransferPoint | None = None,
        spare: bool = False,
    ) -> None:
        self.epoch, self.name, self.model, self.limits, self.config = epoch, name, model, limits, config
        self.transfer = transfer or TransferPoint()
        self.block_size = limits.block_size
        self.token_budget = min(config.max_num_batched_tokens, limits.max_num_batched_tokens)
        # A decode takes one token of the budget, so more seats than budget could not all run.
        self.seats = min(config.max_num_seqs, limits.max_num_seqs, self.token_budget)
        self.is_paged = config.kv is KvLayout.PAGED
        self.pool: KvPool = (
            BlockPool(limits.num_blocks, config.eviction) if self.is_paged else RunPool(limits.num_blocks)
        )
        self.host = HostPool(limits.num_host_blocks if config.preemption is Preemption.SWAP else 0)
        self.pace = Pace()
        self.watermark_blocks = int(config.watermark * limits.num_blocks)
        self.draining = False
        """Its sequences move to others, and it takes no new ones."""
        self.stays = False
        """When it is drained, it stays attached, paused, until it is resumed."""
        self.must_empty = False
        """It has been draining too long: what no other lane has room for goes back to the queue all the same."""
        self.spare = spare
        """It takes sequences only while no lane of its model that is none does."""
        self.stands_by = False
        """It is a spare, and there is such a lane."""
        self.last_ticket = 0
        """The newest sequence that waited at the last plan, see `Sequence.ticket`."""
        self.num_departures = 0
        """Sequences that have left the lane."""
        self.peak_too_high: tuple[int, int, int] | None = None
        """Ticket of the sequence with which the predicted peak did not fit, departures until then, and when."""
        self.num_prefills_in_a_row = 0
        """Iterations of prefill alone since the last with decodes, where phases are separate."""
        self.batch_is_closed = False
        """Under request-level batching: members stay, and nobody joins, until the last of them has ended."""
        self.iteration = 0
        self.busy_until = -1.0
        """When the executor was done with the newest acknowledged iteration, had its plan come at once; -1: none."""
        self.in_flight: InFlight | None = None
        self.changes = PlanChanges()
        self.decoding = np.empty(0, np.int64)
        """Slots whose only uncomputed token is their last one."""
        self.prefilling: list[Sequence] = []
        self.arriving: set[int] = set()
        """Slots whose KV is on its way from another lane: seated here, and unknown to the executor."""
        self.lent: dict[int, list[int]] = {}
        """Blocks of sequences that have left, by the ticket of the hand-over that may still read them."""
        self._furnish(model.max_model_len)

    def _furnish(self, max_model_len: int) -> None:
        """The seats: all columns, empty. Raises `MemoryError`."""
        max_blocks = -(-max_model_len // self.block_size)
        # np.zeros commits memory as rows are touched, so long contexts cost nothing until they are used.
        self.tokens = np.zeros((self.seats, max_model_len + 1), np.int32)
        self.blocks = np.zeros((self.seats, max_blocks), np.int32)
        self.length = np.zeros(self.seats, np.int32)
        """Known tokens."""
        self.computed = np.zeros(self.seats, np.int32)
        """Tokens whose KV is written and acknowledged."""
        self.prompt_length = np.zeros(self.seats, np.int32)
        self.max_length = np.zeros(self.seats, np.int32)
        self.num_blocks = np.zeros(self.seats, np.int32)
        self.predicted_length = np.zeros(self.seats, np.int32)
        """Tokens it will have when it ends, as far as is known."""
        self.num_published = np.zeros(self.seats, np.int32)
        """Of its full blocks, those that were offered to the prefix index or came from it."""
        self.tenant = np.zeros(self.seats, np.int32)
        """Numbers from `FairShare.index`, under `fair`."""
        self.key_row = np.zeros(self.seats, np.int32)
        """See `Sequence.key_row`."""
        self.owner = np.zeros(self.seats, np.int32)
        self.stream = np.zeros(self.seats, np.uint32)
        self.last_token_at = np.zeros(self.seats, np.float64)
        """See `Sequence.last_token_at`."""
        self.generation = np.zeros(self.seats, np.uint32)
        self.occupant: list[Sequence | None] = [None] * self.seats
        self.is_seated = np.zeros(self.seats, np.bool_)
        """Whether a slot has an occupant."""
        self.rank = np.zeros(self.seats, np.int32)
        """See `Sequence.rank`."""
        self.free_slots = list(range(self.seats - 1, -1, -1))

    @property
    def admits(self) -> bool:
        """Whether it takes new sequences."""
        return not (self.draining or self.stands_by)

    @property
    def num_kv_tokens(self) -> int:
        """Tokens of KV that its pool holds."""
        return self.limits.num_blocks * self.block_size

    @property
    def num_running(self) -> int:
        return self.seats - len(self.free_slots)

    @property
    def is_vacant(self) -> bool:
        """Whether nothing of this lane is needed any more, but what is cached."""
        return not self.num_running and not self.lent

    @property
    def may_preempt(self) -> bool:
        return self.config.preemption is not Preemption.NONE

    def running(self) -> list[Sequence]:
        return [sequence for sequence in self.occupant if sequence is not None]

    def resident(self) -> list[Sequence]:
        """Those running whose KV is here."""
        return [sequence for sequence in self.running() if sequence.slot not in self.arriving]

    def members_in_flight(self) -> set[Sequence]:
        """Who is in the iteration in flight."""
        if self.in_flight is None:
            return set()
        rows = {self.occupant[slot] for slot in self.in_flight.decodes.tolist()}
        return {sequence for sequence in rows if sequence is not None} | {s for s, _ in self.in_flight.prefills}

    def table(self, slot: int) -> list[int]:
        """Block table of a slot, as a list."""
        table: list[int] = self.blocks[slot, : self.num_blocks[slot]].tolist()
        return table

    def could_hold(self, sequence: Sequence) -> bool:
        """Whether the empty pool has room for all that a sequence may become."""
        return sequence.max_length - 1 <= self.pool.num_blocks * self.block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def prefix_hit(self, sequence: Sequence) -> list[int]:
        """Cached blocks that a waiting sequence could start from; at least its last token is left to compute."""
        if not self.config.prefix_caching or not self.is_paged or sequence.params.prompt_logprobs >= 0:
            return []
        count = (len(sequence.tokens) - 1) // self.block_size
        self._extend_hashes(sequence, sequence.tokens, count)
        return self.pool.lookup(sequence.hashes[:count])

    def _extend_hashes(self, sequence: Sequence, tokens: NDArray[np.int32], count: int) -> None:
        key = self.model.fingerprint + self.block_size.to_bytes(4, "little")
        if sequence.hash_key != key:
            sequence.hash_key, sequence.hashes = key, []
        extend_hashes(sequence.hashes, tokens, self.block_size, key, count, sequence.salt)

    def num_blocks_at_admission(self, sequence: Sequence) -> int:
        """Blocks for all its known tokens; under contiguous KV, for all that it may become."""
        return self.num_blocks_for(len(sequence.tokens) if self.is_paged else max(1, sequence.max_length - 1))

    def admit(self, sequence: Sequence, hit: list[int], predicted_length: int) -> None:
        """Seat a waiting sequence with its blocks: the first shared from the cache, the next swapped in."""
        table = self._take_blocks(sequence, hit)
        computed = self._swap_in(sequence, table, len(hit))
        self._seat(sequence, table, predicted_length)
        self._begin(sequence, computed, len(hit))

    def expect(self, sequence: Sequence, hit: list[int], predicted_length: int) -> None:
        """Seat a sequence whose KV beyond the hit is yet to come, straight from another lane."""
        self._seat(sequence, self._take_blocks(sequence, hit), predicted_length)
        self.arriving.add(sequence.slot)

    def arrive(self, sequence: Sequence, computed: int, num_hit: int) -> None:
        """The KV of an expected sequence is there, that of so many tokens."""
        self.arriving.remove(sequence.slot)
        self._begin(sequence, computed, num_hit)
        self.publish(sequence)

    def _take_blocks(self, sequence: Sequence, hit: list[int]) -> list[int]:
        self.pool.share(hit)
        return hit + self.pool.allocate(self.num_blocks_at_admission(sequence) - len(hit))

    def _seat(self, sequence: Sequence, table: list[int], predicted_length: int) -> None:
        """Give a sequence a slot, and its columns; it computes nothing yet."""
        slot = self.free_slots.pop()
        count = len(sequence.tokens)
        sequence.state, sequence.lane, sequence.slot, sequence.prefilling = State.RUNNING, self, slot, False
        self.occupant[slot] = sequence
        self.is_seated[slot] = True
        self.rank[slot] = sequence.rank
        self.generation[slot] += 1
        self.tokens[slot, :count] = sequence.tokens
        self.blocks[slot, : len(table)] = table
        self.num_blocks[slot] = len(table)
        self.length[slot] = count
        self.computed[slot] = self.num_published[slot] = 0
        self.prompt_length[slot] = sequence.prompt_length
        self.max_length[slot] = min(sequence.max_length, self.model.max_model_len)
        self.predicted_length[slot] = predicted_length
        self.owner[slot], self.stream[slot] = sequence.owner, sequence.stream
        self.key_row[slot] = sequence.key_row
        self.last_token_at[slot] = sequence.last_token_at

    def _begin(self, sequence: Sequence, computed: int, num_hit: int) -> None:
        """A seated sequence takes part in iterations; the next plan tells the executor of it."""
        slot = sequence.slot
        self.computed[slot] = computed
        self.num_published[slot] = num_hit
        sequence.prefilling = True
        self.prefilling.append(sequence)
        self.changes.new.append(
            NewSequence(
                slot=slot,
                generation=int(self.generation[slot]),
                tokens=sequence.tokens,
                prompt_length=sequence.prompt_length,
                computed=computed,
                blocks=self.blocks[slot, : self.num_blocks[slot]].copy(),
                params=sequence.params,
            )
        )

    # --- swapping ---

    def swap_out(self, sequence: Sequence) -> bool:
        """Order the KV of a running sequence to be moved to the host, before its blocks are given up.

        Returns whether there is room for it, and anything to move.
        """
        slot = sequence.slot
        count = self.num_blocks_for(int(self.computed[slot]))
        host = self.host.allocate(count) if count and self.changes.is_told(slot) else None
        if host is None:
            return False
        self.changes.swap_outs += zip(self.blocks[slot, :count].tolist(), host, strict=True)
        sequence.swapped = SwappedKv(self, host, int(self.computed[slot]))
        return True

    def _swap_in(self, sequence: Sequence, table: list[int], num_hit: int) -> int:
        """Order what the host holds beyond the hit into the blocks of the table; how many tokens are computed then."""
        swapped, computed = sequence.swapped, num_hit * self.block_size
        if swapped is None:
            return computed
        if swapped.lane is self and swapped.computed > computed:
            pairs = zip(swapped.blocks[num_hit:], table[num_hit : len(swapped.blocks)], strict=True)
            self.changes.swap_ins += pairs
            computed = swapped.computed
        drop_swapped(sequence)
        return computed

    # --- running sequences ---

    def append_blocks(self, slots: NDArray[np.int64]) -> None:
        """Give each of these slots one more block."""
        blocks = self.pool.allocate(len(slots))
        self.blocks[slots, self.num_blocks[slots]] = blocks
        self.num_blocks[slots] += 1
        self.changes.appended_slots += slots.tolist()
        self.changes.appended_blocks += blocks

    def publish(self, sequence: Sequence) -> None:
        """Make the full blocks that are computed and acknowledged findable by later sequences."""
        slot = sequence.slot
        first, count = int(self.num_published[slot]), int(self.computed[slot]) // self.block_size
        if count <= first or not self.config.prefix_caching or sequence.retention is Retention.DROP:
            return
        self._extend_hashes(sequence, self.tokens[slot], count)
        self.num_published[slot] = count
        self.pool.publish_many(self.blocks[slot, first:count].tolist(), sequence.hashes[first:count])

    def release(self, sequence: Sequence, state: State) -> None:
        """Give up a sequence's slot and blocks, for another state. Nothing may be in flight that writes them.

        Its known tokens go back into the sequence; its computed blocks stay findable until they are evicted.
        """
        self.pool.release(self.unseat(sequence), sequence.retention)
        sequence.state = state

    def unseat(self, sequence: Sequence) -> list[int]:
        """Give up a sequence's slot alone. Returns its table, whose blocks it still holds."""
        slot = sequence.slot
        is_expected = slot in self.arriving
        # No iteration touches what is expected.
        assert (self.in_flight is None or is_expected) and self.occupant[slot] is sequence
        self.publish(sequence)
        self.update_tokens(sequence)
        sequence.num_reached = max(sequence.num_reached, int(self.computed[slot]))
        sequence.last_token_at = float(self.last_token_at[slot])
        table = self.table(slot)
        self.leave_slot(sequence)
        self.free_slots.append(slot)
        if self.changes.is_told(slot) and not is_expected:
            self.changes.freed.append(slot)
        self.changes.forget(slot)
        return table

    def update_tokens(self, sequence: Sequence) -> None:
        """Note the known tokens of a running sequence in it, as if it were to wait."""
        sequence.tokens = self.tokens[sequence.slot, : self.length[sequence.slot]].copy()

    def leave_slot(self, sequence: Sequence) -> None:
        """Take a sequence out of the running set."""
        slot = sequence.slot
        self.num_departures += 1
        self.occupant[slot] = None
        self.is_seated[slot] = False
        if slot in self.arriving:
            self.arriving.remove(slot)
        elif sequence.prefilling:
            self.prefilling.remove(sequence)
        else:
            self.decoding = self.decoding[self.decoding != slot]
        sequence.lane, sequence.slot, sequence.prefilling = None, -1, False

    def check_invariants(self) -> None:
        """Raise AssertionError unless the columns, the pool and the running set agree."""
        slots = [slot for slot, sequence in enumerate(self.occupant) if sequence is not None]
        assert sorted(slots + self.free_slots) == list(range(self.seats)), "slots: each occupied or free"
        assert np.flatnonzero(self.is_seated).tolist() == slots
        self.pool.check_invariants([*(self.table(slot) for slot in slots), *self.lent.values()])
        decoding = {int(slot) for slot in self.decoding}
        prefilling = {sequence.slot for sequence in self.prefilling}
        assert len(decoding) == len(self.decoding) and not decoding & prefilling
        assert not (decoding | prefilling) & self.arriving
        assert decoding | prefilling | self.arriving == set(slots), "running: each decoding, prefilling or arriving"
        for slot in slots:
            sequence = self.occupant[slot]
            assert sequence is not None and sequence.state is State.RUNNING
            assert sequence.lane is self and sequence.slot == slot
            assert self.rank[slot] == sequence.rank and self.prompt_length[slot] == sequence.prompt_length
            computed, length = int(self.computed[slot]), int(self.length[slot])
            assert computed < length <= int(self.max_length[slot]), "order: a token is computed after it is known"
            assert int(self.num_blocks[slot]) * self.block_size >= computed
            if slot in self.arriving:
                assert not computed, "computed before it has come"
            if slot in decoding:
                assert computed == length - 1


def drop_swapped(sequence: Sequence) -> None:
    """Give back the host blocks of a sequence, if it has any."""
    if sequence.swapped is not None:
        sequence.swapped.lane.host.release(sequence.swapped.blocks)
        sequence.swapped = None
