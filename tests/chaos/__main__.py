"""`python -m tests.chaos`: seeded rounds of disturbances against real processes, every answer compared.

The last line is `rounds N lost L changed C duplicated D recovery_p99_ms X`. The exit status is 1 when anything was
found, 2 when the services could not be started. Round i of `--seed S` has the seed S + i, and `--rounds 1` repeats it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tests.chaos import cables
from tests.chaos.checker import Fault, Finding
from tests.chaos.rounds import Outcome, Rounds, plain_script, reference_settings, stack_settings
from tests.chaos.schedule import plan_round
from tests.chaos.services import Services, Settings, Unfit

ROUND_S = 180.0
RENEW = 50
"""Rounds after which services give way to new ones, with the other setting for hand-overs."""
HANDOVER = ("always", "auto")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="how many rounds")
    parser.add_argument("--seed", type=int, default=1, help="seed of the first one")
    parser.add_argument("--jobs", type=int, default=1, help="services that are disturbed side by side")
    parser.add_argument("--real", action="store_true", help="executors run the embedded model; they start slowly")
    choices = ("auto", "relay", "namespaces")
    parser.add_argument(
        "--network", choices=choices, default="auto", help="a namespace for each executor (root), or a relay alone"
    )
    parser.add_argument("--handover", choices=HANDOVER, help="the scheduler's; none: now the one, now the other")
    parser.add_argument(
        "--keep", type=Path, help="folder for the services' logs; none: they are kept after a finding only"
    )
    return parser.parse_args(arguments)


class Report:
    """Gathers what the rounds brought, and prints it."""

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []
        self.started = time.monotonic()

    def add(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        for finding in outcome.findings:
            ask = "" if finding.ask is None else f" request {finding.ask}"
            print(f"{finding.fault}: seed {outcome.seed}{ask}: {finding.text}", flush=True)
        if len(self.outcomes) % 50 == 0:
            print(f"{len(self.outcomes)} rounds in {time.monotonic() - self.started:.0f} s", flush=True)

    def count(self, fault: Fault) -> int:
        return sum(finding.fault is fault for outcome in self.outcomes for finding in outcome.findings)

    @property
    def clean(self) -> bool:
        return not any(outcome.findings for outcome in self.outcomes)

    def finish(self) -> None:
        kinds: Counter[str] = sum((outcome.kinds for outcome in self.outcomes), Counter())
        ends: Counter[str] = sum((outcome.ends for outcome in self.outcomes), Counter())
        times = sorted(seconds * 1000 for outcome in self.outcomes for seconds in outcome.recoveries_s)
        print("disturbances: " + ", ".join(f"{kind} {count}" for kind, count in kinds.most_common()))
        print("requests: " + ", ".join(f"{end} {count}" for end, count in ends.most_common()))
        handovers: Counter[str] = sum((outcome.handovers for outcome in self.outcomes), Counter())
        print("hand-overs: " + ", ".join(f"{outcome} {count}" for outcome, count in handovers.most_common()))
        print(f"recoveries: {len(times)}, p50 {percentile(times, 0.5):.0f} ms, p99 {percentile(times, 0.99):.0f} ms")
        print(f"left over: {self.count(Fault.LEFT_OVER)}")
        lost, changed, doubled = (self.count(fault) for fault in (Fault.LOST, Fault.CHANGED, Fault.DUPLICATED))
        print(
            f"rounds {len(self.outcomes)} lost {lost} changed {changed} duplicated {doubled} "
            f"recovery_p99_ms {percentile(times, 0.99):.0f}",
            flush=True,
        )


def percentile(ordered: list[float], share: float) -> float:
    """The smallest value that so large a share does not exceed; nan where there is none."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


async def work(
    name: str, modes: Iterator[str], settings: Settings, reference: Services, seeds: deque[int], report: Report
) -> None:
    """Run rounds on services of this worker's own until there are no seeds left. `modes`: of `--handover`."""
    services: Services | None = None
    num_rounds = 0
    while seeds:
        seed = seeds.popleft()
        num_rounds += 1
        try:
            if services is not None and num_rounds % RENEW == 0:
                last, services = services, None
                await last.stop()
            if services is None:
                flags = ["--handover", next(modes), *settings.scheduler_flags]
                services = Services(stack_settings(replace(settings, scheduler_flags=flags)), name)
                services.script = plain_script()
                await services.start()
                rounds = Rounds(services, reference)
            async with asyncio.timeout(ROUND_S):
                report.add(await rounds.run(plan_round(seed, real=settings.real)))
        except (Unfit, TimeoutError) as error:
            report.add(Outcome(seed, [Finding(Fault.LEFT_OVER, str(error) or "the round did not end")]))
            if services is not None:
                with contextlib.suppress(Unfit):
                    await services.stop()
            services = None
    if services is not None:
        await services.stop()


async def run(options: argparse.Namespace, folder: Path) -> Report:
    use_cables = options.network == "namespaces" or (options.network == "auto" and cables.available())
    settings = Settings(folder, real=options.real, cables=use_cables)
    reference = Services(reference_settings(settings), "reference")
    reference.script = plain_script()
    report, seeds = Report(), deque(range(options.seed, options.seed + options.rounds))
    for number in (signal.SIGINT, signal.SIGTERM):
        # The rounds under way come to their end, and the report tells of those that there were.
        asyncio.get_running_loop().add_signal_handler(number, seeds.clear)
    try:
        await reference.start()
        modes = itertools.cycle([options.handover] if options.handover else HANDOVER)
        names = [f"stack-{i}" for i in range(options.jobs)]
        await asyncio.gather(*(work(name, modes, settings, reference, seeds, report) for name in names))
    finally:
        await reference.stop()
    return report


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    folder = options.keep or Path(tempfile.mkdtemp(prefix="gilir-chaos-"))
    try:
        report = asyncio.run(run(options, folder))
    except Unfit as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if report.clean and options.keep is None:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        print(f"logs: {folder}")
    report.finish()
    return 0 if report.clean else 1


if __name__ == "__main__":
    raise SystemExit(main())
