"""What the scheduling core costs for each iteration, without sockets, executor or model.

    python -m benchmarks.scheduler_cost [--json] [--quick] [--peer PYTHON]

Two parts of an iteration are timed, through the core's public verbs alone:

- plan: `Scheduler.plan`, and encoding the plan for the executor;
- apply: decoding the executor's result, `Scheduler.apply`, and encoding the `Tokens` messages for the frontend.

The cases:

- decode: every sequence generates one token an iteration. Prompts differ in length so that each iteration sees one
  sixteenth of the sequences start a new block. `waiting` more sequences find no seat.
- admit: so many prompts are submitted, planned and applied in one iteration of prefill; hashing their blocks counts
  where the core does it. Those that wait are of a lower class (the peer runs without them).

Blocks hold 16 tokens, the pool 200,000 blocks. Ours and the peer's rounds alternate on a machine that may be shared: a
figure is the median of the rounds, of which each is the median of its iterations, in microseconds of CPU time; the
fastest round is given beside it. The garbage collector is on; what there is before the first request is frozen, as in a
server.

`--peer` names a Python with vLLM, whose scheduler gets the same load from `benchmarks/peers/vllm_scheduler.py`; its
figure is `schedule` and `update_from_output`, without any coding of messages.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from common.wire import Limits, ModelCard, Plan, Result, SamplingParams, Submit, decode, encode
from scheduler_svc.core import Scheduler, SchedulerConfig

BLOCK_SIZE = 16
NUM_BLOCKS = 200_000
VOCAB_SIZE = 49_152
PROMPT = 512
TOKEN_BUDGET = 1 << 22
"""Whatever there is to prefill fits into one iteration."""
ROUND = BLOCK_SIZE
"""Decode iterations of a round: each sequence starts one block."""
WARM_UP = 2
"""Rounds that are not counted."""
FRONTEND = 1


@dataclass(frozen=True)
class Case:
    """A load on one lane."""

    what: str
    running: int
    waiting: int = 0
    context: int = PROMPT
    """Tokens of each prompt, or a few more."""

    @property
    def max_tokens(self) -> int:
        """As many as the pool has room for, and enough for all rounds."""
        room = NUM_BLOCKS * 95 // 100 // self.running * BLOCK_SIZE - self.context - BLOCK_SIZE
        return min(room, 2048)

    def prompt_lengths(self) -> list[int]:
        stagger = BLOCK_SIZE if self.what == "decode" else 1
        return [self.context + i % stagger for i in range(self.running)]


FULL = (
    *(Case("decode", running) for running in (8, 64, 256, 1024, 4096)),
    Case("decode", 64, context=32_768),
    Case("decode", 256, waiting=100_000),
    Case("admit", 256),
    Case("admit", 256, waiting=100_000),
)
QUICK = (Case("decode", 8), Case("decode", 256), Case("decode", 64, waiting=2_000), Case("admit", 64))


@dataclass
class Figures:
    """By round, in microseconds of CPU time."""

    plan: list[float] = field(default_factory=list)
    apply: list[float] = field(default_factory=list)
    submit: list[float] = field(default_factory=list)
    """Admission only."""
    peer: list[float] = field(default_factory=list)
    peer_submit: list[float] = field(default_factory=list)


class Core:
    """One scheduler with one lane, whose executor answers at once with random tokens."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.random = np.random.default_rng(0)
        max_len = case.context + BLOCK_SIZE + max(case.max_tokens, 16)
        config = SchedulerConfig(
            max_num_seqs=case.running, max_num_batched_tokens=TOKEN_BUDGET, max_waiting=case.waiting + case.running
        )
        self.scheduler = Scheduler(config)
        model = ModelCard("m", b"fingerprint", VOCAB_SIZE, max_len, (), "bfloat16")
        limits = Limits(BLOCK_SIZE, NUM_BLOCKS, 0, case.running, TOKEN_BUDGET)
        self.lane = self.scheduler.attach("executor", model, limits, time.thread_time())
        self.params = SamplingParams(max(case.max_tokens, 16), temperature=0.0, ignore_eos=True)
        self.num_streams = 0
        gc.collect()
        gc.freeze()
        if case.what == "decode":
            self.submit([self.request(length) for length in case.prompt_lengths()])
            self.iterate()
        self.submit([self.request(BLOCK_SIZE) for _ in range(case.waiting)])

    def request(self, length: int) -> Submit:
        prompt = self.random.integers(0, VOCAB_SIZE, length, np.int32)
        self.num_streams += 1
        return Submit(self.num_streams, 1, f"request-{self.num_streams}", "m", prompt, self.params)

    def submit(self, requests: list[Submit]) -> None:
        for request in requests:
            self.scheduler.submit(FRONTEND, request, time.thread_time())

    def iterate(self) -> tuple[float, float]:
        """One iteration with all that runs. Returns the seconds of its two parts."""
        start = time.thread_time()
        plan = self.scheduler.plan(self.lane, start)
        assert plan is not None
        data = encode(plan)
        planned = time.thread_time()
        rows = len(plan.decodes) + len(plan.prefills)
        assert rows == self.case.running and len(data), f"{rows} of {self.case.running} in the iteration"
        answer = encode(self.answer(plan, rows))
        arrived = time.thread_time()
        result = decode(answer)
        assert isinstance(result, Result)
        self.scheduler.apply(self.lane, result, arrived)
        outbox, self.scheduler.outbox = self.scheduler.outbox, []
        for _, message in outbox:
            encode(message)
        return planned - start, time.thread_time() - arrived

    def answer(self, plan: Plan, rows: int) -> Result:
        tokens = self.random.integers(0, VOCAB_SIZE, rows, np.int32)
        return Result(plan.epoch, plan.iteration, tokens, np.zeros(rows, np.uint8))

    def decode_round(self, figures: Figures) -> None:
        parts = [self.iterate() for _ in range(ROUND)]
        figures.plan.append(1e6 * statistics.median(plan for plan, _ in parts))
        figures.apply.append(1e6 * statistics.median(apply for _, apply in parts))

    def admit_round(self, figures: Figures) -> None:
        """Submit prompts, run them for one iteration, and drop them. Those that wait are of a lower class."""
        requests = [self.request(length) for length in self.case.prompt_lengths()]
        requests = [Submit(r.first_stream, 1, r.request_id, "m", r.prompt, r.params, -1) for r in requests]
        start = time.thread_time()
        self.submit(requests)
        figures.submit.append(1e6 * (time.thread_time() - start))
        plan, apply = self.iterate()
        figures.plan.append(1e6 * plan)
        figures.apply.append(1e6 * apply)
        self.scheduler.abort(FRONTEND, [request.first_stream for request in requests], time.thread_time())
        self.scheduler.outbox.clear()


class Peer:
    """vLLM's scheduler in a process of its own, which does one thing at a time, when told to."""

    def __init__(self, python: str) -> None:
        script = Path(__file__).parent / "peers" / "vllm_scheduler.py"
        self._process = subprocess.Popen(
            [python, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def ask(self, **question: int | str) -> dict[str, float]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the peer has ended; run its script alone to see why")
        answer: dict[str, float] = json.loads(line)
        return answer

    def prepare(self, case: Case) -> None:
        self.ask(
            do="prepare",
            what=case.what,
            running=case.running,
            waiting=case.waiting,
            context=case.context,
            max_tokens=max(case.max_tokens, 16),
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            vocab_size=VOCAB_SIZE,
        )

    def decode_round(self, figures: Figures) -> None:
        figures.peer.append(self.ask(do="decode", iterations=ROUND)["us"])

    def admit_round(self, figures: Figures) -> None:
        answer = self.ask(do="admit")
        figures.peer.append(answer["us"])
        figures.peer_submit.append(answer["submit_us"])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)


def measure(case: Case, rounds: int, peer: Peer | None) -> Figures:
    """Alternate rounds of ours and the peer's; the warm-up is left out."""
    core, figures = Core(case), Figures()
    if case.what == "admit" and case.waiting:
        peer = None
    if peer is not None:
        peer.prepare(case)
    for number in range(WARM_UP + rounds):
        if number == WARM_UP:
            figures = Figures()
        for side in (core, peer):
            if side is not None:
                (side.decode_round if case.what == "decode" else side.admit_round)(figures)
    return figures


def summary(case: Case, figures: Figures) -> dict[str, object]:
    """One line of output: medians of rounds, and of their fastest under `min`."""
    columns = {
        "plan_us": figures.plan,
        "apply_us": figures.apply,
        "submit_us": figures.submit,
        "peer_us": figures.peer,
        "peer_submit_us": figures.peer_submit,
    }
    line: dict[str, object] = {
        "what": case.what,
        "running": case.running,
        "waiting": case.waiting,
        "context": case.context,
    }
    line |= {name: round(statistics.median(values), 1) if values else None for name, values in columns.items()}
    line["min"] = {name: round(min(values), 1) for name, values in columns.items() if values}
    return line


def table_row(line: dict[str, object]) -> str:
    """The same as text: median and, in brackets, the fastest round."""
    fastest = line["min"]
    assert isinstance(fastest, dict)
    cells = [f"{line['what']:<7}{line['running']:>6}{line['waiting']:>8}{line['context']:>8}"]
    for name in ("submit_us", "plan_us", "apply_us", "peer_submit_us", "peer_us"):
        cells.append("" if line[name] is None else f"{line[name]:,.0f} ({fastest[name]:,.0f})")
    return cells[0] + "".join(f"{cell:>19}" for cell in cells[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description="What the scheduling core costs for each iteration.")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--quick", action="store_true", help="a few small cases, few rounds")
    parser.add_argument("--peer", metavar="PYTHON", help="a Python with vLLM, to run its scheduler beside ours")
    arguments = parser.parse_args()
    peer = Peer(arguments.peer) if arguments.peer else None
    if not arguments.json:
        heads = ("submit us", "plan us", "apply us", "peer submit us", "peer us")
        print(f"{'case':<7}{'run':>6}{'wait':>8}{'context':>8}" + "".join(f"{head:>19}" for head in heads))
    for case in QUICK if arguments.quick else FULL:
        figures = measure(case, 3 if arguments.quick else 8, peer)
        line = summary(case, figures)
        print(json.dumps(line) if arguments.json else table_row(line), flush=True)
        gc.unfreeze()
    if peer is not None:
        peer.close()


if __name__ == "__main__":
    main()
