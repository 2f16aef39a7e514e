"""Runs sequences on a runner, keeping their slots and blocks as the scheduler would."""

from __future__ import annotations

from typing import Any

from common.wire import FinishCode, Plan, Result, decode, encode
from executor_svc.runner import Runner
from tests.executor.plans import ids, new_sequence, slots


def run(runner: Runner, plan: Plan) -> Result:
    answer = runner.run(plan)
    assert isinstance(answer, Result), answer
    assert decode(encode(answer)) == answer
    return answer


class Server:
    """Decodes all that runs in every step, and prefills newcomers beside."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.block_size = runner.limits.block_size
        self.iteration = 0
        self.generation = dict.fromkeys(range(runner.limits.max_num_seqs), 0)
        self.free_blocks = list(range(runner.limits.num_blocks))
        self.tables: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        self.output: dict[int, list[int]] = {}
        self.ended: set[int] = set()
        self.freed: list[int] = []

    def step(self, new: dict[int, dict[str, Any]] | None = None, chunk: int | None = None) -> None:
        """One iteration: decode all that run and prefill the newcomers, by chunks when `chunk` is given."""
        decodes = [slot for slot in self.tables if slot not in self.ended]
        appended = []
        for slot in decodes:
            if self.lengths[slot] > len(self.tables[slot]) * self.block_size:
                self.tables[slot].append(self.free_blocks.pop())
                appended.append((slot, self.tables[slot][-1]))
        newcomers = []
        for slot, fields in (new or {}).items():
            tokens = fields["tokens"]
            self.generation[slot] += 1
            self.tables[slot] = [self.free_blocks.pop() for _ in range(-(-len(tokens) // self.block_size))]
            self.lengths[slot], self.output[slot] = len(tokens), []
            newcomers.append(new_sequence(slot, blocks=self.tables[slot], generation=self.generation[slot], **fields))
        changes: dict[str, Any] = {
            "appended_slots": slots(*(s for s, _ in appended)),
            "appended_blocks": ids(*(b for _, b in appended)),
            "freed": slots(*self.freed),
        }
        self.freed = []
        left = {item.slot: len(item.tokens) for item in newcomers}
        first = True
        while first or any(left.values()):
            rows = [slot for slot, count in left.items() if count]
            lengths = [min(left[slot], chunk or 1000) for slot in rows]
            self.iteration += 1
            plan = Plan(
                1,
                self.iteration,
                decodes=slots(*decodes) if first else slots(),
                prefills=slots(*rows),
                prefill_lengths=ids(*lengths),
                new=tuple(newcomers) if first else (),
                **(changes if first else {}),
            )
            for slot, length in zip(rows, lengths, strict=True):
                left[slot] -= length
            sampled = [*(decodes if first else []), *(slot for slot in rows if not left[slot])]
            self.take(run(self.runner, plan), sampled)
            first = False

    def take(self, result: Result, sampled: list[int]) -> None:
        for slot, token, code in zip(sampled, result.tokens.tolist(), result.finish.tolist(), strict=True):
            self.output[slot].append(token)
            self.lengths[slot] += 1
            if code != FinishCode.CONTINUE:
                self.ended.add(slot)

    def free(self, slot: int) -> None:
        self.free_blocks += self.tables.pop(slot)
        self.ended.discard(slot)
        self.freed.append(slot)
