"""Synthetic lengths and arrivals. Random, from a generator that the caller seeds."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

ABSURD = 1e12
"""Longer than any sequence; larger numbers are cut to it, so that they are refused as whole numbers."""
ARRIVALS = ("trace", "poisson", "gamma", "bursts", "all-at-once", "closed")


class DistributionError(ValueError):
    """A text that names no distribution."""


def draw(text: str, count: int, random: np.random.Generator) -> Ints:
    """`count` whole numbers, at least 1.

    `text` is `fixed:N`, `uniform:LOW:HIGH` (both included) or `lognormal:MEDIAN:SIGMA`. Raises `DistributionError`.
    """
    kind, *raw = text.split(":")
    wanted = {"fixed": 1, "uniform": 2, "lognormal": 2}
    if wanted.get(kind) != len(raw):
        raise DistributionError(f"expected fixed:N, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA, got {text!r}")
    try:
        numbers = [float(value) for value in raw]
    except ValueError:
        raise DistributionError(f"{text!r}: {kind} needs numbers") from None
    if not all(math.isfinite(number) for number in numbers) or numbers[0] < 1 or numbers[-1] < 0:
        raise DistributionError(f"{text!r}: the numbers must be at least 1 (sigma: at least 0)")
    numbers = [min(number, ABSURD) for number in numbers]
    if kind == "fixed":
        return np.full(count, int(numbers[0]), np.int64)
    if kind == "uniform":
        if numbers[1] < numbers[0]:
            raise DistributionError(f"{text!r}: the second number is below the first")
        return random.integers(int(numbers[0]), int(numbers[1]) + 1, count)
    lengths = np.rint(numbers[0] * random.lognormal(0.0, numbers[1], count))
    return np.clip(lengths, 1, ABSURD).astype(np.int64)


def arrivals(kind: str, count: int, rate: float, cv: float, burst: int, random: np.random.Generator) -> Floats:
    """Rising arrival times in seconds from 0, on average `rate` a second.

    `gamma`: gaps with the coefficient of variation `cv` (1 is Poisson). `bursts`: `burst` at a time, Poisson in
    between. `all-at-once` and `closed` (which the simulation starts one by one): all at 0.
    """
    if kind in ("all-at-once", "closed"):
        return np.zeros(count)
    if kind == "poisson":
        gaps = random.exponential(1 / rate, count)
    elif kind == "gamma":
        shape = 1 / cv**2
        gaps = random.gamma(shape, 1 / (shape * rate), count)
    elif kind == "bursts":
        gaps = np.where(np.arange(count) % burst == 0, random.exponential(burst / rate, count), 0.0)
    else:
        raise DistributionError(f"unknown arrivals {kind!r}; there are {', '.join(ARRIVALS)}")
    gaps[0] = 0.0
    return np.cumsum(gaps)


def rescaled(times: Floats, rate: float) -> Floats:
    """Arrival times stretched or squeezed so that on average `rate` come in a second."""
    span = float(times[-1] - times[0])
    if span <= 0:
        raise DistributionError("all requests of the trace arrive at one time: there is no rate to change")
    result: Floats = (times - times[0]) * ((len(times) - 1) / rate / span)
    return result
