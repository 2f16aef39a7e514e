"""What is asked of the scheduler: requests as columns, made from a trace, from distributions, or from both."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.wire import SamplingParams, Submit
from scheduler_svc.simulator import traces
from scheduler_svc.simulator.distributions import ARRIVALS, DistributionError, arrivals, draw, rescaled
from scheduler_svc.simulator.traces import MOONCAKE_BLOCK, Trace

VOCABULARY = 1 << 24
MAX_REQUESTS = VOCABULARY - 1


class WorkloadError(ValueError):
    """Settings that make no workload. The text names the flag."""


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """Columns by request number, in order of arrival."""

    arrivals: NDArray[np.float64]
    """Seconds. Of no meaning in a closed loop."""
    prompt_lengths: NDArray[np.int64]
    output_lengths: NDArray[np.int64]
    tenants: NDArray[np.int64]
    num_tenants: int
    priorities: NDArray[np.int64]
    deadlines_ms: NDArray[np.int64] | None = None
    prefixes: list[NDArray[np.int32]] | None = None
    """See `Trace.prefixes`."""
    max_tokens: NDArray[np.int64] | None = None
    """What each request allows, at least what it is answered with; None: exactly that."""
    concurrency: int = 0
    """Above 0, a closed loop: so many requests are out at any time, and the next comes when one ends."""

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    @property
    def longest(self) -> int:
        """The most tokens that a request may come to, prompt and answer together."""
        return int((self.prompt_lengths + (self.output_lengths if self.max_tokens is None else self.max_tokens)).max())

    def prompt(self, number: int) -> NDArray[np.int32]:
        """Token ids: prompts share a prefix exactly where the trace says so."""
        length = int(self.prompt_lengths[number])
        if self.prefixes is None:
            return np.full(length, number + 1, np.int32)
        return np.repeat(self.prefixes[number] + 1, MOONCAKE_BLOCK)[:length].astype(np.int32)

    def allowed(self, number: int) -> int:
        """The `max_tokens` of a request."""
        return int(self.output_lengths[number] if self.max_tokens is None else self.max_tokens[number])

    def submit(self, number: int, model: str) -> Submit:
        """The request as a frontend would send it. Its seed is its number, so that executors know it too."""
        return Submit(
            first_stream=number,
            n=1,
            request_id=str(number),
            model=model,
            prompt=self.prompt(number),
            params=SamplingParams(self.allowed(number), seed=number, ignore_eos=self.max_tokens is None),
            priority=int(self.priorities[number]),
            tenant=tenant_name(int(self.tenants[number])),
            deadline_ms=0 if self.deadlines_ms is None else int(self.deadlines_ms[number]),
        )


def tenant_name(number: int) -> str:
    return f"t{number}"


@dataclass(frozen=True, slots=True)
class WorkloadSettings:
    """What the command line says of the workload."""

    trace: Path | None = None
    layout: str = "auto"
    requests: int | None = None
    rate: float | None = None
    arrivals: str | None = None
    """One of `ARRIVALS`; None: the trace's own where it has any, else Poisson with a rate, else all at once."""
    cv: float = 1.0
    burst_size: int = 16
    concurrency: int | None = None
    prompt_lengths: str | None = None
    output_lengths: str | None = None
    max_tokens: str | None = None
    """What requests allow; None: as much as they are answered with."""
    tenants: int = 1
    tenant_skew: float = 0.0
    priorities: str = "0:1"
    deadlines_ms: str | None = None
    seed: int = 0


def build(settings: WorkloadSettings) -> Workload:
    """Make the workload. Raises `WorkloadError` or `TraceError`."""
    _check(settings)
    random = np.random.default_rng(settings.seed)
    trace = _trace(settings) if settings.trace is not None else None
    count = len(trace.prompt_lengths) if trace is not None else settings.requests or 0
    if settings.requests is not None and settings.requests > count:
        raise WorkloadError(f"--requests: the trace holds {count} requests, {settings.requests} were asked for")
    prompts, outputs = _lengths(settings, trace, count, random)
    allowed = None
    if settings.max_tokens is not None:
        allowed = np.maximum(_draw("--max-tokens", settings.max_tokens, count, random), outputs)
    return Workload(
        arrivals=_arrivals(settings, trace, count, random),
        prompt_lengths=prompts,
        output_lengths=outputs,
        tenants=_tenants(settings, count, random),
        num_tenants=settings.tenants,
        priorities=_priorities(settings.priorities, count, random),
        deadlines_ms=None
        if settings.deadlines_ms is None
        else _draw("--deadlines-ms", settings.deadlines_ms, count, random),
        prefixes=trace.prefixes if trace is not None and settings.prompt_lengths is None else None,
        max_tokens=allowed,
        concurrency=(settings.concurrency or 0) if settings.arrivals == "closed" else 0,
    )


def _trace(settings: WorkloadSettings) -> Trace:
    assert settings.trace is not None
    return traces.read(settings.trace, settings.requests, settings.layout)


def _check(settings: WorkloadSettings) -> None:
    if settings.arrivals is not None and settings.arrivals not in ARRIVALS:
        raise WorkloadError(f"--arrivals: expected one of {', '.join(ARRIVALS)}, got {settings.arrivals!r}")
    if settings.requests is not None and not 1 <= settings.requests <= MAX_REQUESTS:
        raise WorkloadError(f"--requests: must lie within 1 and {MAX_REQUESTS}, got {settings.requests}")
    for flag, value in (("--rate", settings.rate), ("--cv", settings.cv)):
        if value is not None and not 0 < value < float("inf"):
            raise WorkloadError(f"{flag}: must be above 0, got {value:g}")
    for flag, number in (("--burst-size", settings.burst_size), ("--tenants", settings.tenants)):
        if number < 1:
            raise WorkloadError(f"{flag}: must be at least 1, got {number}")
    if not 0 <= settings.tenant_skew < 100:
        raise WorkloadError(f"--tenant-skew: must be at least 0, got {settings.tenant_skew:g}")
    if settings.arrivals == "closed" and not (settings.concurrency or 0) >= 1:
        raise WorkloadError("--arrivals closed needs --concurrency, at least 1")
    if settings.arrivals != "closed" and settings.concurrency is not None:
        raise WorkloadError("--concurrency goes with --arrivals closed")
    if settings.trace is None:
        for flag, given in (
            ("--requests", settings.requests),
            ("--prompt-lengths", settings.prompt_lengths),
            ("--output-lengths", settings.output_lengths),
        ):
            if given is None:
                raise WorkloadError(f"without --trace, {flag} is needed")


def _arrivals(
    settings: WorkloadSettings, trace: Trace | None, count: int, random: np.random.Generator
) -> NDArray[np.float64]:
    times = trace.arrivals if trace is not None else None
    kind = settings.arrivals
    if kind is None:
        kind = "trace" if times is not None else "poisson" if settings.rate is not None else "all-at-once"
    if kind == "trace":
        if times is None:
            raise WorkloadError("--arrivals trace: there is no trace with times")
        try:
            return times if settings.rate is None else rescaled(times, settings.rate)
        except DistributionError as error:
            raise WorkloadError(f"--rate: {error}") from None
    if kind in ("poisson", "gamma", "bursts") and settings.rate is None:
        raise WorkloadError(f"--arrivals {kind} needs --rate (requests a second)")
    return arrivals(kind, count, settings.rate or 1.0, settings.cv, settings.burst_size, random)


def _lengths(
    settings: WorkloadSettings, trace: Trace | None, count: int, random: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Prompt and output lengths; a flag goes before the trace."""
    prompts = trace.prompt_lengths if trace is not None else np.empty(0, np.int64)
    outputs = trace.output_lengths if trace is not None else np.empty(0, np.int64)
    if settings.prompt_lengths is not None:
        prompts = _draw("--prompt-lengths", settings.prompt_lengths, count, random)
    if settings.output_lengths is not None:
        outputs = _draw("--output-lengths", settings.output_lengths, count, random)
    for flag, lengths in (("--prompt-lengths", prompts), ("--output-lengths", outputs)):
        if lengths.max() > traces.MAX_LENGTH:
            raise WorkloadError(f"{flag}: {int(lengths.max())} tokens are more than {traces.MAX_LENGTH}")
    return prompts, outputs


def _draw(flag: str, text: str, count: int, random: np.random.Generator) -> NDArray[np.int64]:
    try:
        return draw(text, count, random)
    except DistributionError as error:
        raise WorkloadError(f"{flag}: {error}") from None


def _tenants(settings: WorkloadSettings, count: int, random: np.random.Generator) -> NDArray[np.int64]:
    """Tenant k asks in proportion to 1 / (k + 1)**skew."""
    shares = 1.0 / np.arange(1, settings.tenants + 1) ** settings.tenant_skew
    return random.choice(settings.tenants, count, p=shares / shares.sum()).astype(np.int64)


def _priorities(text: str, count: int, random: np.random.Generator) -> NDArray[np.int64]:
    """`CLASS:SHARE,CLASS:SHARE`."""
    try:
        pairs = [part.split(":") for part in text.split(",")]
        classes = np.array([int(name) for name, _ in pairs], np.int64)
        shares = np.array([float(share) for _, share in pairs])
    except ValueError:
        raise WorkloadError(f"--priorities: expected CLASS:SHARE,CLASS:SHARE, got {text!r}") from None
    if not np.all((shares >= 0) & np.isfinite(shares)) or not shares.sum() > 0 or np.abs(classes).max() >= 1 << 31:
        raise WorkloadError(f"--priorities: shares must be numbers of at least 0, got {text!r}")
    return random.choice(classes, count, p=shares / shares.sum()).astype(np.int64)
