"""Medians and ratios of sums with 95 % bootstrap intervals. Pure functions on arrays, seeded, so a report can be made again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

RESAMPLES = 2000
_TAILS = (2.5, 97.5)

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A value with the ends of its 95 % interval; of a single observation the ends are the value itself."""

    value: float
    low: float
    high: float

    @property
    def has_interval(self) -> bool:
        return self.low < self.high


def median(values: ArrayLike) -> Estimate:
    """Median [n], interval over resampled values."""
    x = np.asarray(values, np.float64)
    picks = np.random.default_rng(0).integers(0, len(x), (RESAMPLES, len(x)))
    return _estimate(float(np.median(x)), np.median(x[picks], axis=1))


def ratio_of_sums(top: ArrayLike, bottom: ArrayLike) -> Estimate:
    """sum(top) / sum(bottom) over prompts [n], interval over resampled prompts."""
    weights = _weights(len(np.asarray(top)))
    return _estimate(_ratio(top, bottom), _ratios(weights, top, bottom))


def relative_gain(tree: tuple[ArrayLike, ArrayLike], linear: tuple[ArrayLike, ArrayLike]) -> Estimate:
    """Accepted length of tree over linear, minus 1, each given as (emitted, rounds) by the same prompts [n]."""
    weights = _weights(len(np.asarray(tree[0])))
    value = _ratio(*tree) / _ratio(*linear) - 1
    return _estimate(value, _ratios(weights, *tree) / _ratios(weights, *linear) - 1)


def mean_of(estimates: Sequence[float]) -> float:
    return float(np.mean(estimates)) if len(estimates) else float("nan")


def _weights(count: int) -> Floats:
    """How often each of `count` prompts is drawn: [RESAMPLES, count]."""
    return np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), RESAMPLES).astype(np.float64)


def _ratio(top: ArrayLike, bottom: ArrayLike) -> float:
    return float(np.sum(np.asarray(top, np.float64)) / np.sum(np.asarray(bottom, np.float64)))


def _ratios(weights: Floats, top: ArrayLike, bottom: ArrayLike) -> Floats:
    return (weights @ np.asarray(top, np.float64)) / np.maximum(weights @ np.asarray(bottom, np.float64), 1e-12)


def _estimate(value: float, resampled: Floats) -> Estimate:
    low, high = np.percentile(resampled, _TAILS)
    return Estimate(value, float(low), float(high))
