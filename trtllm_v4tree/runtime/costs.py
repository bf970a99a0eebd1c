"""What a round costs on this machine, now: the engine's latency table, corrected by the rounds that were run.

The table was measured when the engine was built, with another load, perhaps with other threads. What matters is how the ways to run a
round compare, so they are compared where they meet: the arm in use sets the level of the machine, which moves within seconds, and rounds
of another arm between its rounds say by how much the table is wrong about the two. Errors are kept as logarithms, one for drafting at
all, one for each draft round and one for each number of nodes, each with its own doubt (a Kalman filter with independent parts).

Beside other programs most plain rounds run undisturbed and a few take very long, while longer rounds are all disturbed: their medians say
nothing about tokens per second. So stretches count by their means, and by as much as their rounds are alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trtllm_v4tree.runtime.latency import LatencyTable

Floats = NDArray[np.float64]
_FOLLOWS, _SETTLED = 0.5, 2
_NOISE, _SCATTER, _MEMORY, _WILD, _ALARM = 0.005, 0.04, 0.1, 2.0, 2.0
_DRAFTING, _PART = 0.1, 0.002
_DRIFT, _NEW = (1 / 512, 1 / 64), 0.25


class Arm(NamedTuple):
    """A way to run a round: the draft round (steps and topk), None for plain decoding, and the nodes that each sequence verifies."""

    shape: tuple[int, int] | None
    nodes: int


PLAIN = Arm(None, 1)


class Costs:
    """Milliseconds of whole rounds by arm; `saw` records what some took. Arrays are [draft round, nodes - 1]."""

    def __init__(self, table: LatencyTable, shapes: Sequence[tuple[int, int]], max_nodes: int) -> None:
        self.table, self.shapes, self.max_nodes = table, tuple(shapes), max_nodes
        self._place = {shape: index for index, shape in enumerate(self.shapes)}
        self._prior = [_DRAFTING, *[_PART] * (len(self.shapes) + max_nodes)]
        self._drift = [_DRIFT[part > 0] * prior for part, prior in enumerate(self._prior)]
        self._buckets: dict[int, _Bucket] = {}
        self._tables: dict[int, Floats] = {}

    def plain_ms(self, batch: int) -> float:
        return self._table_ms(batch, PLAIN) * math.exp(self._bucket(batch).level)

    def rounds_ms(self, batch: int) -> Floats:
        """Of every round that drafts: [S, N]."""
        bucket, count = self._bucket(batch), len(self.shapes) + 1
        error = np.array(bucket.errors)
        return self._table(batch) * np.exp(bucket.level + error[0] + error[1:count, None] + error[None, count:])

    def doubts(self, batch: int) -> Floats:
        """Standard deviations of the logarithms of `rounds_ms`, against each other: [S, N]."""
        variance, count = np.array(self._bucket(batch).variances), len(self.shapes) + 1
        return np.sqrt(variance[1:count, None] + variance[None, count:])

    def doubt(self, batch: int) -> float:
        """The same of drafting at all against plain decoding."""
        return math.sqrt(self._bucket(batch).variances[0])

    def saw(self, batch: int, arm: Arm, times: Sequence[float]) -> None:
        """A stretch of rounds of an arm: milliseconds of each, two at least."""
        log_ratio = math.log(max(float(np.mean(times)), 1e-6) / self._table_ms(batch, arm))
        own = self._bucket(batch)
        own.saw(arm, self._parts(arm), log_ratio, _NOISE + own.scatter_with(times) / len(times))

    def age(self) -> None:
        """Time has passed: what was measured may have changed."""
        for bucket in self._buckets.values():
            bucket.variances = [
                max(v, min(v + d, p)) for v, d, p in zip(bucket.variances, self._drift, self._prior, strict=True)
            ]

    def _bucket(self, batch: int) -> _Bucket:
        """A new one starts from what the nearest has shown, with more doubt."""
        key = bucket(batch)
        if key not in self._buckets:
            made = _Bucket([0.0] * len(self._prior), list(self._prior))
            if self._buckets:
                near = self._buckets[min(self._buckets, key=lambda other: abs(other - key))]
                made.errors, made.level = list(near.errors), near.level
                made.variances = [max(v, _NEW * p) for v, p in zip(near.variances, self._prior, strict=True)]
            self._buckets[key] = made
        return self._buckets[key]

    def _parts(self, arm: Arm) -> tuple[int, ...]:
        """Which errors an arm has."""
        return () if arm.shape is None else (0, 1 + self._place[arm.shape], len(self.shapes) + arm.nodes)

    def _table_ms(self, batch: int, arm: Arm) -> float:
        if arm.shape is None:
            return self.table.target_ms(batch, 1) + self.table.overhead_ms(batch)
        return float(self._table(batch)[self._place[arm.shape], arm.nodes - 1])

    def _table(self, batch: int) -> Floats:
        if batch not in self._tables:
            drafts = np.array([self.table.draft_ms(*shape, batch) for shape in self.shapes])
            verify = self.table.target_curve(batch, self.max_nodes) + self.table.overhead_ms(batch)
            self._tables[batch] = drafts[:, None] + verify
        return self._tables[batch]


class _Bucket:
    """What rounds of some batch sizes have shown: errors of the table with their variances, and the level of the machine."""

    def __init__(self, errors: list[float], variances: list[float]) -> None:
        self.errors, self.variances = errors, variances
        self.level, self._scatter = 0.0, _SCATTER
        self._reference: Arm | None = None
        self._parts: tuple[int, ...] = ()
        self._other, self._in_a_row = PLAIN, 0

    def saw(self, arm: Arm, parts: tuple[int, ...], log_ratio: float, noise: float) -> None:
        """`log_ratio`: of what it took to what the table says."""
        surprise = log_ratio - self.level - sum(self.errors[part] for part in parts)
        if self._reference is None:
            self.level += surprise
        elif arm == self._reference:
            self.level += _FOLLOWS * surprise
        else:
            self._correct(parts, surprise, noise)
        self._in_a_row = self._in_a_row + 1 if arm == self._other else 1
        self._other = arm
        if self._in_a_row >= _SETTLED or self._reference is None:
            self._reference, self._parts = arm, parts

    def scatter_with(self, times: Sequence[float]) -> float:
        """Variance of a round over its squared mean, lately or in these rounds, whichever is larger."""
        own = float(np.var(times, ddof=1) / np.mean(times) ** 2)
        self._scatter += _MEMORY * (own - self._scatter)
        return max(own, self._scatter)

    def _correct(self, parts: tuple[int, ...], surprise: float, noise: float) -> None:
        """Shares a surprise among the errors in which an arm differs from the reference; what that one takes was no surprise.
        A wild one counts in part and adds to the doubt: perhaps the machine hiccupped, perhaps the table is far off."""
        own = [part for part in parts if part not in self._parts]
        others = [part for part in self._parts if part not in parts]
        total = noise + sum(self.variances[part] for part in own + others)
        most = _WILD * math.sqrt(total)
        wild, surprise = abs(surprise) > most, _held(surprise, most)
        signed = [(1.0, part) for part in own] + [(-1.0, part) for part in others]
        for sign, part in signed:
            gain = self.variances[part] / total
            self.errors[part] += sign * gain * surprise
            self.variances[part] *= _ALARM if wild else 1 - gain
            self.level += gain * surprise if sign < 0 else 0.0


def _held(value: float, most: float) -> float:
    return min(max(value, -most), most)


def bucket(batch: int) -> int:
    """Batch sizes that share their corrections: 1, 2, 3-4, 5-8, ..."""
    return (batch - 1).bit_length()
