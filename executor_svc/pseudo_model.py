"""A stand-in for a language model that shows every mix-up of sequences and every stale block.

The "KV" of position p is a 64-bit hash of tokens 0 … p, built from the KV of position p-1 as it is read through the
block table. The next token is drawn from the last hash, so it is a pure function of the whole history (and of the seed,
when the temperature is not 0). When any block of the context holds something else than this sequence's history, the
token comes out different.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from common.wire import SamplingParams
from executor_svc.batch import BatchState, Work

UInt64s = NDArray[np.uint64]

_BASE = 0x9E3779B97F4A7C15
_BASE_INVERSE = pow(_BASE, -1, 1 << 64)


def _powers(base: int, count: int) -> UInt64s:
    """base**0 … base**(count-1), modulo 2**64."""
    powers = np.full(max(count, 1), base, np.uint64)
    powers[0] = 1
    return np.multiply.accumulate(powers)


def _mix(values: UInt64s) -> UInt64s:
    """The finaliser of splitmix64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def prefix_hashes(tokens: NDArray[np.integer], before: UInt64s | int = 0) -> UInt64s:
    """Hash of each prefix of `tokens` after a history of hash `before`: h[i] = h[i-1] * BASE + tokens[i] + 1."""
    terms = (np.asarray(tokens).astype(np.int64) + 1).astype(np.uint64)
    sums = np.cumsum(terms * _powers(_BASE_INVERSE, len(terms)), dtype=np.uint64)
    start = np.atleast_1d(np.asarray(before, np.uint64)) * np.uint64(_BASE)
    return _powers(_BASE, len(terms)) * (sums + start)


def expected_tokens(
    prompt: NDArray[np.integer] | list[int], count: int, alphabet: NDArray[np.integer], params: SamplingParams
) -> list[int]:
    """What the pseudo model says after a prompt: the reference for tests."""
    tokens = [int(token) for token in prompt]
    for _ in range(count):
        last = prefix_hashes(np.array(tokens))[-1:]
        tokens.append(
            int(_draw(last, _salts(np.array([params.temperature]), np.array([params.seed], np.uint64)), alphabet)[0])
        )
    return tokens[len(prompt) :]


def _salts(temperature: NDArray[np.floating], seed: UInt64s) -> UInt64s:
    """A greedy draw does not depend on the seed."""
    return np.where(temperature > 0, _mix(seed + np.uint64(1)), np.uint64(0))


def _draw(states: UInt64s, salts: UInt64s, alphabet: NDArray[np.integer]) -> NDArray[np.int64]:
    picked: NDArray[np.int64] = alphabet[_mix(states ^ salts) % np.uint64(len(alphabet))].astype(np.int64)
    return picked


class PseudoModel:
    """Device and host pools of hashes, and the forward pass over them."""

    def __init__(self, state: BatchState, alphabet: NDArray[np.integer], verify: bool = True) -> None:
        self.state, self.alphabet, self.verify = state, alphabet, verify
        block_size, limits = state.block_size, state.limits
        self.kv = np.zeros(limits.num_blocks * block_size, np.uint64)
        self.host = np.zeros(limits.num_host_blocks * block_size, np.uint64)
        self.num_corrupt = 0
        """Sampled rows whose context held something else than their history."""

    def move(self, copies: NDArray[np.int32], outs: NDArray[np.int32], ins: NDArray[np.int32]) -> None:
        """Swap blocks out, in, and copy them, in this order. Pairs (from, to), flattened."""
        device, host = (pool.reshape(-1, self.state.block_size) for pool in (self.kv, self.host))
        host[outs[1::2]] = device[outs[0::2]]
        device[ins[1::2]] = host[ins[0::2]]
        device[copies[1::2]] = device[copies[0::2]]

    def forward(self, work: Work) -> NDArray[np.int64]:
        """Write the hashes of this iteration's tokens; returns a token for each row that samples."""
        decodes = work.num_decodes
        before = self._before(work)
        self.kv[work.kv_slots[:decodes]] = before[:decodes] * np.uint64(_BASE) + (work.token_ids[:decodes] + 1).astype(
            np.uint64
        )
        for row in range(decodes, len(work.slots)):
            span = slice(work.query_start[row], work.query_start[row + 1])
            self.kv[work.kv_slots[span]] = prefix_hashes(work.token_ids[span], before[row])
        states = self.kv[work.kv_slots[work.logit_rows]]
        if self.verify:
            states = states ^ self._damage(work)
        slots, state = work.sample_slots, self.state
        salts = _salts(state.temperature[slots], state.seed[slots].view(np.uint64))
        return _draw(states, salts, self.alphabet)

    def _before(self, work: Work) -> UInt64s:
        """Hash of what lies before each row's first token, read through the block table."""
        last = work.positions[work.query_start[:-1]] - 1
        block_size = self.state.block_size
        blocks = self.state.block_tables[work.slots, np.maximum(last, 0) // block_size].astype(np.int64)
        at = blocks * block_size + last % block_size
        return np.where(last >= 0, self.kv[at], np.uint64(0))

    def _damage(self, work: Work) -> UInt64s:
        """For each sampled row: 0 when all of its context is its own history."""
        damage = np.zeros(len(work.sample_rows), np.uint64)
        block_size = self.state.block_size
        tables = self.state.tables_of(work)
        for i, (row, slot) in enumerate(zip(work.sample_rows.tolist(), work.sample_slots.tolist(), strict=True)):
            count = int(work.context_lens[row])
            table = tables[row, : -(-count // block_size)].astype(np.int64)
            context = self.kv.reshape(-1, block_size)[table].reshape(-1)[:count]
            expected = prefix_hashes(self.state.tokens[slot, :count])
            if not np.array_equal(context, expected):
                damage[i] = (context ^ expected).sum(dtype=np.uint64) | np.uint64(1)
                self.num_corrupt += 1
        return damage


class PseudoBlocks:
    """The device pool of hashes as a store of blocks that can be handed over."""

    def __init__(self, pseudo: PseudoModel) -> None:
        self._kv = pseudo.kv.reshape(-1, pseudo.state.block_size)
        self.num_blocks = len(self._kv)
        self.block_bytes = 8 * pseudo.state.block_size
        self.layout = b"pseudo %8d" % pseudo.state.block_size

    def read(self, blocks: list[int]) -> bytes:
        return self._kv[blocks].tobytes()

    def write(self, blocks: list[int], data: bytes) -> None:
        self._kv[blocks] = np.frombuffer(data, np.uint64).reshape(len(blocks), -1)
