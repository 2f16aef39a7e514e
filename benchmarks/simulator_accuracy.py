"""How well the simulator predicts a real run: the embedded model behind the real services on this machine.

    python benchmarks/simulator_accuracy.py [--requests 100] [--load 0.65] [--preset FILE] [--scripted-ms MS]

Two stretches of load are measured: one to calibrate from (a burst, then Poisson arrivals), another, with other lengths
and arrivals, to predict. The cost model comes from the first stretch's plan log, and so does what a request waits
beside iterations (HTTP, the frontend, the way to the core and back): the median, over its requests, of the time to
first token at the client less that at the core.

Run it while nothing else runs. On a machine that others use, `--scripted-ms` takes an executor that sleeps for so long
at every iteration instead of computing: all but the computing is then put to the test.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.wire import Tokens
from deploy.local import ROOT, LocalServices
from scheduler_svc.core import SchedulerConfig
from scheduler_svc.plan_log.player import Player
from scheduler_svc.simulator.calibrate import cost_model, describe
from scheduler_svc.simulator.cost_model import CostModel
from scheduler_svc.simulator.fitting import fit
from scheduler_svc.simulator.samples import iterations
from scheduler_svc.simulator.simulation import ExecutorSetup, Simulation
from scheduler_svc.simulator.summary import summarise
from scheduler_svc.simulator.workload import Workload, WorkloadSettings, build

SETUP = ExecutorSetup(blocks=2048, block_size=16, seats=32, token_limit=512)
LIMITS = ["--num-blocks", "2048", "--max-num-seqs", "32", "--max-num-batched-tokens", "512"]
PROMPTS, OUTPUTS = "lognormal:120:0.8", "lognormal:40:0.7"
"""About a sixth of the Azure conversation trace's lengths: the embedded model's context holds 1024 tokens."""
LONGEST_PROMPT, LONGEST_OUTPUT = 600, 300


@dataclass(slots=True)
class Measured:
    """One request as its client saw it, in seconds of the monotonic clock."""

    sent: float
    first: float
    last: float


def workload(count: int, seed: int, rate: float | None) -> Workload:
    """Lengths and arrivals; all at once without a rate."""
    made = build(WorkloadSettings(requests=count, prompt_lengths=PROMPTS, output_lengths=OUTPUTS, rate=rate, seed=seed))
    prompts = np.minimum(made.prompt_lengths, LONGEST_PROMPT)
    return replace(made, prompt_lengths=prompts, output_lengths=np.minimum(made.output_lengths, LONGEST_OUTPUT))


async def ask(port: int, prompt: list[int], max_tokens: int) -> Measured:
    """Stream one completion over a connection of its own."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0, "stream": True}
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    sent = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + data)
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError(f"the service answered {status.decode()}{(await reader.read()).decode()}")
    first = last = 0.0
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            last = time.monotonic()
            first = first or last
    writer.close()
    return Measured(sent, first, last)


async def replay(port: int, load: Workload, seed: int) -> list[Measured]:
    """Send each request at its time. No two prompts begin alike."""
    random = np.random.default_rng(seed)
    begin = time.monotonic()

    async def one(number: int) -> Measured:
        prompt = random.integers(10, 4000, int(load.prompt_lengths[number])).tolist()
        await asyncio.sleep(max(0.0, begin + float(load.arrivals[number]) - time.monotonic()))
        return await ask(port, prompt, int(load.output_lengths[number]))

    return list(await asyncio.gather(*(one(number) for number in range(len(load)))))


def rate_of(answers: Sequence[Measured]) -> float:
    """Requests a second."""
    return len(answers) / (max(one.last for one in answers) - min(one.sent for one in answers))


def core_times(log: Path, begin: float, end: float) -> NDArray[np.float64]:
    """Times to first token as the core saw them, of the requests submitted from `begin` to before `end`."""
    submitted: dict[tuple[int, int], float] = {}
    took = []
    for step in Player(log).steps():
        if step.request is not None and begin <= step.now < end:
            submitted[step.owner, step.request.first_stream] = step.now
        for owner, message in step.messages:
            if isinstance(message, Tokens):
                for stream in message.streams.tolist():
                    if (owner, stream) in submitted:
                        took.append(step.now - submitted.pop((owner, stream)))
    return np.array(took)


@dataclass(frozen=True, slots=True)
class Stretch:
    """One part of the run."""

    name: str
    load: Workload
    answers: list[Measured]

    @property
    def begin(self) -> float:
        return min(one.sent for one in self.answers)

    @property
    def end(self) -> float:
        return max(one.last for one in self.answers)

    def first_tokens(self) -> NDArray[np.float64]:
        return np.array([one.first - one.sent for one in self.answers])


def measure(port: int, count: int, share: float) -> list[Stretch]:
    """Warm up, then a burst and steady load to calibrate from, then both again to be predicted."""
    asyncio.run(replay(port, workload(12, 0, None), 0))
    stretches, rate = [], 0.0
    for name, seed in (("calibration", 1), ("test", 3)):
        burst = workload(count, seed, None)
        stretches.append(Stretch(f"{name}, all at once", burst, asyncio.run(replay(port, burst, seed))))
        rate = rate or share * rate_of(stretches[0].answers)
        steady = workload(count, seed + 1, rate)
        what = f"{name}, {rate:.2f} requests/s"
        stretches.append(Stretch(what, steady, asyncio.run(replay(port, steady, seed + 1))))
    return stretches


def calibrate(log: Path, stretches: Sequence[Stretch]) -> CostModel:
    """The cost model of some stretches; its constant for a request comes from the last of them."""
    begin, end = stretches[0].begin, stretches[-1].end
    found = fit(iterations(log, begin, end))
    print(describe(found), end="")
    steady = stretches[-1]
    at_core = core_times(log, steady.begin, steady.end)
    beside = float(np.median(steady.first_tokens()) - np.median(at_core))
    source = "plan log of benchmarks/simulator_accuracy.py: the embedded model in float32, one thread of a"
    executor = {"blocks": SETUP.blocks, "block_size": SETUP.block_size, "seats": SETUP.seats, "token_limit": 512}
    source = f"{source} machine with {os.cpu_count()} cores, which serves the rest too"
    model = cost_model(found, "embedded-cpu", source, executor)
    return replace(model, request_s=round(max(beside, 0.0), 6))


def compare(stretch: Stretch, cost: CostModel) -> bool:
    """Print what was measured beside what the simulator says. True when throughput and p90 TTFT are within 15 %."""
    said = summarise(Simulation(SchedulerConfig(), SETUP, cost, stretch.load).run(), cost)
    took = np.array([one.last - one.sent for one in stretch.answers])
    ttft = stretch.first_tokens()
    tokens_per_s = float(stretch.load.output_lengths.sum()) / (stretch.end - stretch.begin)
    lines = [
        ("tokens/s", tokens_per_s, said.tokens_per_s),
        ("requests/s", rate_of(stretch.answers), said.requests_per_s),
        ("TTFT p50, ms", 1000 * float(np.quantile(ttft, 0.5)), 1000 * said.ttft_p50_s),
        ("TTFT p90, ms", 1000 * float(np.quantile(ttft, 0.9)), 1000 * said.ttft_p90_s),
        ("end to end p50, ms", 1000 * float(np.quantile(took, 0.5)), 1000 * said.e2e_p50_s),
        ("end to end p99, ms", 1000 * float(np.quantile(took, 0.99)), 1000 * said.e2e_p99_s),
    ]
    print(f"\n{stretch.name:<32}{'measured':>12}{'simulated':>12}{'error':>9}")
    for name, measured, simulated in lines:
        print(f"  {name:<30}{measured:12.2f}{simulated:12.2f}{simulated / measured - 1:+9.1%}")
    wrong = [
        abs(simulated / measured - 1) for name, measured, simulated in lines if name in ("tokens/s", "TTFT p90, ms")
    ]
    return max(wrong) <= 0.15


def busy_s() -> tuple[float, float]:
    """(CPU seconds that the whole machine has spent, that this process and its ended children have)."""
    user, nice, system = (int(ticks) for ticks in Path("/proc/stat").read_text().split()[1:4])
    own = os.times()
    return (user + nice + system) / os.sysconf("SC_CLK_TCK"), sum(own[:4])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100, help="of each of the four stretches (%(default)s)")
    parser.add_argument("--load", type=float, default=0.65, help="steady arrivals, as a share of the burst's rate")
    parser.add_argument("--preset", type=Path, help="write the cost model here")
    parser.add_argument("--scripted-ms", type=float, help="an executor that only sleeps, this long at every iteration")
    options = parser.parse_args()
    begin, (all_before, own_before) = time.monotonic(), busy_s()
    model = str(ROOT / "executor_svc" / "default_model")
    flags = ["--max-num-seqs", str(SETUP.seats), "--max-num-batched-tokens", str(SETUP.token_limit)]
    with LocalServices(scheduler_flags=flags) as services:
        services.start_scheduler()
        if options.scripted_ms is None:
            services.start_executor("--model", model, "--dtype", "float32", "--threads", "1", *LIMITS)
        else:
            slow = ["--delay-ms", str(options.scripted_ms), "--no-verify"]
            services.start_executor("--model", model, *slow, *LIMITS, module="executor_svc.fake")
        services.wait_ready()
        stretches = measure(int(services.url.rsplit(":", 1)[1]), options.requests, options.load)
        for process in services.processes:
            process.stop()
        all_after, own_after = busy_s()
        others = (all_after - all_before - own_after + own_before) / (time.monotonic() - begin)
        print(f"other processes took {others:.0%} of a core")
        cost = calibrate(services.plan_log, stretches[:2])
    print(f"a request waits {1000 * cost.request_s:.1f} ms beside iterations")
    within = [compare(stretch, cost) for stretch in stretches]
    if options.preset is not None:
        options.preset.write_text(cost.to_json())
    print(f"\nthroughput and p90 TTFT of the test within 15 %: {'yes' if all(within[2:]) else 'no'}")
    return 0 if all(within[2:]) else 1


if __name__ == "__main__":
    sys.exit(main())
