"""Runs sequences on a runner by turns: who has no turn waits in the host pool with its KV."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from common.wire import Fault, FinishCode, Limits, NewSequence, Plan, Result
from tests.executor.plans import ids, new_sequence, slots


class PlanRunner(Protocol):
    limits: Limits

    def run(self, plan: Plan) -> Result | Fault: ...

    def reset(self) -> None: ...


@dataclass
class Job:
    """One sequence: on a slot, or in the host blocks `host`, or not begun."""

    request: dict[str, Any]
    output: list[int] = field(default_factory=list)
    computed: int = 0
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    host: list[int] = field(default_factory=list)
    ended: bool = False

    @property
    def tokens(self) -> list[int]:
        return [*self.request["tokens"], *self.output]

    @property
    def left(self) -> int:
        """Known tokens without KV."""
        return len(self.tokens) - self.computed


class SwapServer:
    """Device blocks that a plan frees are given out again in the same plan, the last freed first."""

    def __init__(self, runner: PlanRunner, requests: dict[str, dict[str, Any]]) -> None:
        self.runner, self.block_size = runner, runner.limits.block_size
        self.jobs = {name: Job(request) for name, request in requests.items()}
        self.free_blocks = list(range(runner.limits.num_blocks))
        self.free_host = list(range(runner.limits.num_host_blocks))
        self.free_slots = list(range(runner.limits.max_num_seqs))
        self.iteration = 0
        self.returns: list[tuple[int, int]] = []
        """Of each return from the host: how many tokens had KV, and the prompt's length."""
        self.num_reused = 0
        """Device blocks that were swapped out and given to somebody else by one plan."""
        self._generations = [0] * runner.limits.max_num_seqs

    @property
    def unfinished(self) -> list[str]:
        return [name for name, job in self.jobs.items() if not job.ended]

    def step(self, members: list[str], chunk: int, *, decode_rows: bool = True) -> None:
        """One plan: the members compute their next chunk or token, all others are in the host pool after it.

        Without `decode_rows` the members' single tokens go as chunks of one.
        """
        chosen = [self.jobs[name] for name in members]
        decodes = [job for job in chosen if decode_rows and job.left == 1]
        prefills = [job for job in chosen if job not in decodes]
        lengths = [*(1 for _ in decodes), *(min(job.left, chunk) for job in prefills)]
        freed, outs = self._remove([job for job in self.jobs.values() if job.slot >= 0 and job not in chosen])
        appended: list[int] = []
        ins: list[int] = []
        new: list[NewSequence] = []
        for job, length in zip([*decodes, *prefills], lengths, strict=True):
            missing = -(-(job.computed + length) // self.block_size) - len(job.blocks)
            added = [self.free_blocks.pop() for _ in range(missing)]
            job.blocks += added
            if job.slot < 0:
                new.append(self._enter(job, ins))
            else:
                appended += [number for block in added for number in (job.slot, block)]
        self.num_reused += len({*outs[0::2]} & {block for job in chosen for block in job.blocks})
        self.iteration += 1
        plan = Plan(
            1,
            self.iteration,
            decodes=slots(*(job.slot for job in decodes)),
            prefills=slots(*(job.slot for job in prefills)),
            prefill_lengths=ids(*lengths[len(decodes) :]),
            new=tuple(new),
            freed=slots(*freed),
            appended_slots=slots(*appended[0::2]),
            appended_blocks=ids(*appended[1::2]),
            swap_outs=ids(*outs),
            swap_ins=ids(*ins),
        )
        self._take(plan, [*decodes, *prefills], lengths)

    def _remove(self, leavers: list[Job]) -> tuple[list[int], list[int]]:
        """Free what the leavers hold on the device. Returns their slots, and the swap-outs of who will come back."""
        freed, outs = [], []
        for job in leavers:
            if not job.ended:
                used = job.blocks[: -(-job.computed // self.block_size)]
                job.host = [self.free_host.pop() for _ in used]
                outs += [number for pair in zip(used, job.host, strict=True) for number in pair]
            freed.append(job.slot)
            self.free_slots.append(job.slot)
            self.free_blocks += job.blocks
            job.slot, job.blocks = -1, []
        return freed, outs

    def _enter(self, job: Job, ins: list[int]) -> NewSequence:
        """Give a slot to a job whose blocks are there already, and bring its KV into them."""
        job.slot = self.free_slots.pop()
        self._generations[job.slot] += 1
        if job.host:
            ins += [number for pair in zip(job.host, job.blocks, strict=False) for number in pair]
            self.free_host += job.host
            job.host = []
            self.returns.append((job.computed, len(job.request["tokens"])))
        fields = job.request | {"tokens": job.tokens, "prompt_length": len(job.request["tokens"])}
        generation = self._generations[job.slot]
        return new_sequence(job.slot, blocks=job.blocks, generation=generation, computed=job.computed, **fields)

    def _take(self, plan: Plan, rows: list[Job], lengths: list[int]) -> None:
        result = self.runner.run(plan)
        assert isinstance(result, Result), result
        sampling = [job for job, length in zip(rows, lengths, strict=True) if job.left == length]
        for job, length in zip(rows, lengths, strict=True):
            job.computed += length
        for job, token, code in zip(sampling, result.tokens.tolist(), result.finish.tolist(), strict=True):
            job.output.append(token)
            job.ended = code != FinishCode.CONTINUE
