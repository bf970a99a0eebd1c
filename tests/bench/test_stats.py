"""Estimates: the value is the plain formula, the interval covers what it should."""

from __future__ import annotations

import numpy as np
import pytest

from trtllm_v4tree.bench.stats import median, ratio_of_sums, relative_gain


def test_values_are_the_plain_formulas() -> None:
    assert median([3.0, 1.0, 10.0]).value == 3.0
    assert ratio_of_sums([4, 6], [2, 3]).value == 2.0
    assert relative_gain(([12, 18], [4, 6]), ([10, 15], [4, 6])).value == pytest.approx(0.2)


def test_a_single_observation_has_no_interval() -> None:
    assert not median([2.0]).has_interval
    assert not ratio_of_sums([3], [2]).has_interval


def test_interval_covers_the_truth_about_95_times_in_100() -> None:
    rng = np.random.default_rng(7)
    hits = 0
    for _ in range(200):
        rounds = rng.integers(30, 60, 40)
        emitted = rounds * rng.normal(2.5, 0.4, 40)
        e = ratio_of_sums(emitted, rounds)
        hits += e.low <= 2.5 <= e.high
    assert 180 <= hits <= 199


def test_interval_is_the_same_every_time() -> None:
    values = np.random.default_rng(1).normal(size=30)
    assert median(values) == median(values)
