"""How often drafted tokens are accepted, by depth and child rank, learnt online; what a shape is worth under these rates.

Draft probabilities are less sharp than the agreement they predict, and by how much depends on depth and rank. For every (depth,
rank) two running sums are kept over nodes whose parent was accepted: hits (the target chose this child) and the probability mass that
the drafter had claimed. hits / mass calibrates scores; hits / tries predicts shapes that were not tried.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trtllm_v4tree.runtime.tree import Ints

Floats = NDArray[np.float64]
MAX_DEPTH, MAX_RANK = 16, 16
_PRIOR_TRIES = 8.0
_CEILING = 0.98


class CandidateShape(NamedTuple):
    """Depth and child rank (from 0) of every candidate of a draft round sN_kK, [C] each."""

    depth: Ints
    rank: Ints

    @classmethod
    def of(cls, steps: int, topk: int) -> CandidateShape:
        widths = [topk] + [topk * topk] * (steps - 1)
        depth = np.repeat(np.arange(1, steps + 1), widths)
        return cls(depth, np.concatenate([np.arange(w) % topk for w in widths]))


class Calibration:
    """Running acceptance statistics with exponential forgetting: [depth, rank], depth from 0 for level 1."""

    def __init__(self, half_life: float = 4000.0) -> None:
        self.keep = 0.5 ** (1.0 / half_life)
        shape = (MAX_DEPTH, MAX_RANK)
        self.hits, self.tries, self.mass = np.zeros(shape), np.zeros(shape), np.zeros(shape)

    def update(self, depth: Ints, rank: Ints, claimed: Floats, hit: NDArray[np.bool_]) -> None:
        """One round's nodes whose parent was accepted: [X] each; `claimed` is the drafter's probability of the child."""
        decay = self.keep ** max(1, len(depth))
        for sums, amount in ((self.hits, hit), (self.tries, np.ones(len(depth))), (self.mass, claimed)):
            sums *= decay
            np.add.at(sums, (depth - 1, rank), amount)

    def rates(self) -> Floats:
        """Acceptance probability of a child given its accepted parent, [depth, rank]; what was never tried follows what was.

        Prior: rank r at depth 1 starts at 0.6 / 4^r, and every deeper level at 0.95 of the level above.
        """
        rates = np.empty_like(self.hits)
        prior = 0.6 / 4.0 ** np.arange(MAX_RANK)
        for depth in range(MAX_DEPTH):
            rates[depth] = (self.hits[depth] + _PRIOR_TRIES * prior) / (self.tries[depth] + _PRIOR_TRIES)
            prior = 0.95 * rates[depth]
        return np.minimum(rates, _CEILING)

    def scores(self, local: Floats, shape: CandidateShape) -> Floats:
        """Calibrated log-probability of each candidate given its parent: local [B, C] (log) -> [B, C], at most log 0.98."""
        prior = _PRIOR_TRIES * 0.5
        ratio = (self.hits + prior) / (self.mass + prior)
        factor = np.log(ratio[shape.depth - 1, shape.rank])
        return np.minimum(local + factor, np.log(_CEILING))


def expected_lengths(rates: Floats, steps: int, topk: int, max_budget: int) -> list[float]:
    """Tokens a pass emits with the best static tree of 1, 2, .. nodes of shape sN_kK: 1 + sum of path probabilities.

    The best trees are nested and found greedily, since a node's probability never exceeds its parent's. Entry i is for i + 1 nodes.
    """
    table = rates[:steps, :topk].tolist()
    totals = [1.0]
    heap = [(-p, 1) for p in table[0]]
    heapq.heapify(heap)
    while heap and len(totals) < max_budget:
        negative, depth = heapq.heappop(heap)
        totals.append(totals[-1] - negative)
        if depth < steps:
            for p in table[depth]:
                heapq.heappush(heap, (negative * p, depth + 1))
    return totals
