"""What a draft probability is worth: the chance that the target agrees, learnt from what was accepted.

Drafters are less sharp than the agreement they predict, by how much depends on depth, child rank and text. A logistic regression maps
the drafter's probability of a child (given its parent) to its chance of being accepted (given that its parent was):

    logit P = first child: a + b x + h y;   later child of rank r: c + d x + e y + f log(1 + r);   both: + g log(depth)

with x the logit of the drafter's probability and y that of its rival: the runner-up for a first child, the first one for a later
child. It is fitted by Newton's method to the newest observations under a Gaussian prior, so it starts sensible, needs few rounds, and
what was chosen for verifying does not bias it. The prior is the common fit of both drafters of v4-nano on three kinds of text.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trtllm_v4tree.runtime.tree import Ints

Floats = NDArray[np.float64]
PRIOR = np.array([0.2, 0.9, 0.5, 1.1, -0.6, -0.6, -0.1, -0.5])
PRECISION = 4.0
CEILING = np.log(0.98)
_FLOOR, _SUREST = np.log(1e-9), -1e-4
_RIVAL_SHARE = 0.3
_NEWEST = 1024
_FIRST_FIT, _FIT_EVERY = 32, 256
_NEWTON_STEPS, _SMALLEST_STEP = 4, 1e-6


class CandidateShape(NamedTuple):
    """A draft round sN_kK; depth (from 1), child rank (from 0) and rival sibling of every candidate: [C] each."""

    steps: int
    topk: int
    depth: Ints
    rank: Ints
    rival: Ints

    @classmethod
    @functools.lru_cache(maxsize=256)
    def of(cls, steps: int, topk: int) -> CandidateShape:
        widths = [topk] + [topk * topk] * (steps - 1)
        depth = np.repeat(np.arange(1, steps + 1), widths)
        rank = np.concatenate([np.arange(w) % topk for w in widths])
        rival = np.arange(len(rank)) - np.where(rank > 0, rank, -1 if topk > 1 else 0)
        return cls(steps, topk, depth, rank, rival)

    def rivals(self, local: Floats) -> Floats:
        """Log-probability of each candidate's rival, [B, C]; a chain's is taken as a share of what its one child leaves."""
        if self.topk > 1:
            return local[:, self.rival]
        return np.log(_RIVAL_SHARE) + np.log(-np.expm1(np.minimum(local, _SUREST)))


class Calibration:
    """Fitted weights and the newest observations."""

    def __init__(self) -> None:
        self.weights = PRIOR.copy()
        self._features = np.zeros((0, len(PRIOR)))
        self._hits = np.zeros(0)
        self._new: list[tuple[Floats, Floats, Ints, Ints, Sequence[bool]]] = []
        self._unfitted, self._enough = 0, _FIRST_FIT
        self._terms: dict[tuple[int, int], tuple[Floats, Floats, Floats]] = {}

    def scores(self, local: Floats, shape: CandidateShape) -> Floats:
        """Calibrated log-probability of each candidate given its parent: local [B, C] (log) -> [B, C], at most log 0.98."""
        x = logit(local)
        base, own, rival = self._of_shape(shape)
        z = x * own
        z += base
        z += rival * (x[:, shape.rival] if shape.topk > 1 else logit(shape.rivals(local)))
        return np.minimum(-np.logaddexp(0.0, -z), CEILING)

    def _of_shape(self, shape: CandidateShape) -> tuple[Floats, Floats, Floats]:
        """Constant, weight of x and weight of y for each candidate of a shape: [C] each."""
        key = (shape.steps, shape.topk)
        if key not in self._terms:
            a, b, c, d, e, f, g, h = self.weights
            later = shape.rank > 0
            base = np.where(later, c + f * np.log1p(shape.rank), a) + g * np.log(shape.depth)
            self._terms[key] = (base, np.where(later, d, b), np.where(later, e, h))
        return self._terms[key]

    def update(
        self, local: Floats, shape: CandidateShape, row: list[int], candidate: list[int], hit: Sequence[bool]
    ) -> None:
        """One round's verified candidates whose parent was accepted: sequence, candidate and whether it was accepted, [X] each."""
        rivals = shape.rivals(local)[row, candidate]
        self._new.append((local[row, candidate], rivals, shape.rank[candidate], shape.depth[candidate], hit))
        self._unfitted += len(row)
        if self._unfitted >= self._enough:
            self._fit()

    def _fit(self) -> None:
        local, rivals, rank, depth, hits = (np.concatenate(part) for part in zip(*self._new, strict=True))
        self._features = np.concatenate([self._features, features(local, rivals, rank, depth)])[-_NEWEST:]
        self._hits = np.concatenate([self._hits, hits])[-_NEWEST:]
        self._enough = min(2 * self._enough, _FIT_EVERY)
        self._unfitted = 0
        self._new.clear()
        self._terms.clear()
        self.weights = fit(self._features, self._hits, self.weights)


def features(local: Floats, rivals: Floats, rank: Ints, depth: Ints) -> Floats:
    """Inputs of the regression: log-probability of a child and of its rival, child rank, depth, [X] each -> [X, 8]."""
    x, y, later = logit(local), logit(rivals), (rank > 0).astype(np.float64)
    first = 1 - later
    columns = [first, first * x, later, later * x, later * y, later * np.log1p(rank), np.log(depth), first * y]
    return np.stack(columns, axis=1)


def fit(inputs: Floats, hits: Floats, start: Floats) -> Floats:
    """Most probable weights under the prior: inputs [X, F], hits [X] in {0, 1}, start [F].

    A few steps of Newton's method, each halved until it does not make things worse.
    """
    weights, worst = start, _loss(inputs, hits, start)
    for _ in range(_NEWTON_STEPS):
        p = 1.0 / (1.0 + np.exp(-np.clip(inputs @ weights, -30, 30)))
        slope = inputs.T @ (p - hits) + PRECISION * (weights - PRIOR)
        curvature = (inputs * (p * (1 - p))[:, None]).T @ inputs + PRECISION * np.eye(len(weights))
        step = np.linalg.solve(curvature, slope)
        while (loss := _loss(inputs, hits, weights - step)) > worst and np.abs(step).max() > _SMALLEST_STEP:
            step = step / 2
        if loss > worst:
            break
        weights, worst = weights - step, loss
    return weights


def _loss(inputs: Floats, hits: Floats, weights: Floats) -> float:
    """Negative log-probability of weights, up to a constant."""
    z = inputs @ weights
    return float(np.logaddexp(0.0, z).sum() - hits @ z + PRECISION / 2 * np.square(weights - PRIOR).sum())


def logit(log_probs: Floats) -> Floats:
    """log p -> log p / (1 - p), kept finite."""
    clipped = np.clip(log_probs, _FLOOR, _SUREST)
    return clipped - np.log(-np.expm1(clipped))
