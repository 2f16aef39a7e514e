"""Fits the cost model to measured iterations, and says how far off it is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.simulator.iteration import FEATURES, IterationSample

Floats = NDArray[np.float64]
Pieces = tuple[tuple[float, ...], ...]

HELD_OUT_EVERY = 5
"""Each fifth sample is not fitted but predicted."""
MIN_SAMPLES = 20
BETTER_BY = 0.95
"""Two pieces are taken when their error on held-out samples is below this share of the linear model's."""


class FitError(Exception):
    """There is too little to fit."""


class Fit(NamedTuple):
    """Fitted coefficients and their relative errors |predicted - measured| / measured."""

    pieces: Pieces
    num_samples: int
    num_held_out: int
    median_error: float
    """Of the held-out samples, as are the next two."""
    p90_error: float
    total_error: float
    """Of the sum of their durations; signed."""


def fit(samples: Iterable[IterationSample]) -> Fit:
    """Fit a linear and a two-piece model, and return the better. Raises `FitError` when there are too few samples."""
    rows = [sample for sample in samples if sample.seconds > 0]
    if len(rows) < MIN_SAMPLES:
        raise FitError(f"{len(rows)} iterations with a duration; at least {MIN_SAMPLES} are needed")
    features = np.array([row.features for row in rows], np.float64)
    seconds = np.array([row.seconds for row in rows])
    held_out = np.arange(len(rows)) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
    train_x, train_y, test_x, test_y = features[~held_out], seconds[~held_out], features[held_out], seconds[held_out]
    linear = unbiased(fit_linear(train_x, train_y)[None], train_x, train_y)
    roofline = unbiased(fit_roofline(train_x, train_y), train_x, train_y)
    use_both = np.mean(errors(roofline, test_x, test_y)) < BETTER_BY * np.mean(errors(linear, test_x, test_y))
    best = roofline if use_both else linear
    error = errors(best, test_x, test_y)
    total = float(predict(best, test_x).sum() / test_y.sum() - 1)
    return Fit(
        pieces=tuple(tuple(float(f"{c:.6g}") for c in piece) for piece in best),
        num_samples=len(rows),
        num_held_out=int(held_out.sum()),
        median_error=float(np.median(error)),
        p90_error=float(np.quantile(error, 0.9)),
        total_error=total,
    )


def predict(pieces: Floats, features: Floats) -> Floats:
    """Seconds of each row of `features` (n, 6) under `pieces` (k, 6)."""
    result: Floats = (features @ pieces.T).max(axis=1)
    return result


def errors(pieces: Floats, features: Floats, seconds: Floats) -> Floats:
    """Relative error of each sample."""
    result: Floats = np.abs(predict(pieces, features) / seconds - 1)
    return result


def unbiased(pieces: Floats, features: Floats, seconds: Floats) -> Floats:
    """Scaled so that all samples together take as long as they did: least relative squares favour the quick ones."""
    result: Floats = pieces * (seconds.sum() / max(predict(pieces, features).sum(), 1e-12))
    return result


def fit_linear(features: Floats, seconds: Floats) -> Floats:
    """Non-negative coefficients (6,) with the least sum of squared relative errors."""
    return non_negative_least_squares(features / seconds[:, None], np.ones(len(seconds)))


def fit_roofline(features: Floats, seconds: Floats) -> Floats:
    """Two pieces (2, 6) or, where one never counts, one.

    A max-affine regression by alternating between who belongs to which piece and the pieces (Magnani and Boyd,
    "Convex piecewise-linear fitting", 2009), begun from several cuts of the samples by their number of tokens.
    """
    best, best_error = fit_linear(features, seconds)[None], np.inf
    tokens = features[:, FEATURES.index("decodes")] + features[:, FEATURES.index("prefill_tokens")]
    for cut in np.unique(np.quantile(tokens, [0.2, 0.35, 0.5, 0.65, 0.8, 0.9])):
        pieces = _alternate(features, seconds, tokens > cut)
        error = float(np.mean(errors(pieces, features, seconds)))
        if error < best_error:
            best, best_error = pieces, error
    return best


def _alternate(features: Floats, seconds: Floats, second: NDArray[np.bool_], rounds: int = 30) -> Floats:
    pieces = fit_linear(features, seconds)[None]
    fewest = features.shape[1]
    for _ in range(rounds):
        if second.sum() < fewest or (~second).sum() < fewest:
            break
        pieces = np.stack(
            [fit_linear(features[~second], seconds[~second]), fit_linear(features[second], seconds[second])]
        )
        values = features @ pieces.T
        moved = values[:, 1] > values[:, 0]
        if bool((moved == second).all()):
            break
        second = moved
    return pieces


def non_negative_least_squares(matrix: Floats, target: Floats) -> Floats:
    """The x >= 0 with the least |matrix x - target|² (Lawson and Hanson, "Solving Least Squares Problems", 1974)."""
    scale = np.sqrt((matrix**2).sum(axis=0))
    scale[scale == 0] = 1.0
    scaled = matrix / scale
    gram, moment = scaled.T @ scaled, scaled.T @ target
    count = len(moment)
    passive = np.zeros(count, bool)
    solution = np.zeros(count)
    for _ in range(10 * count):
        gradient = moment - gram @ solution
        gradient[passive] = -np.inf
        if passive.all() or gradient.max() <= 1e-10 * max(1.0, float(np.abs(moment).max())):
            break
        passive[int(gradient.argmax())] = True
        while True:
            trial = np.zeros(count)
            trial[passive] = np.linalg.lstsq(gram[np.ix_(passive, passive)], moment[passive], rcond=1e-12)[0]
            bad = passive & (trial <= 0)
            if not bad.any():
                break
            step = float((solution[bad] / np.maximum(solution[bad] - trial[bad], 1e-300)).min())
            solution = solution + step * (trial - solution)
            passive &= solution > 1e-14
            solution[~passive] = 0.0
        solution = trial
    result: Floats = solution / scale
    return result
