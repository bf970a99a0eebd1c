"""How often a child is accepted once its parent was, by depth and child rank: what a draft round is worth before it is run.

Two memories. The long one holds what belongs to the drafter: how acceptance falls with depth and rank. The short one holds what
belongs to the text: a level not drafted lately is taken to have moved as the level above it has.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trtllm_v4tree.runtime.calibration import CandidateShape

Floats = NDArray[np.float64]
CEILING = 0.98
_FIRST, _NEXT_RANK, _NEXT_DEPTH = 0.6, 0.25, 0.95
_LONG, _SHORT, _SHORT_ROUNDS = 4000.0, 48.0, 3.0
_LONG_PRIOR, _SHORT_PRIOR = 4.0, 4.0


class Acceptance:
    """Running sums over drafted candidates of the chance to be reached and of that to be accepted: [depth, rank], depth 1 first."""

    def __init__(self, steps: int, topk: int) -> None:
        self.steps, self.topk = steps, topk
        self._long, self._short = np.zeros((2, steps, topk)), np.zeros((2, steps, topk))

    def add(self, shape: CandidateShape, reached: Floats, accepted: Floats) -> None:
        """One draft round: chance [B, C] that the parent of each candidate is accepted, and that the candidate is.

        Half of the long memory is forgotten after `_LONG` sequences, of the short one after `_SHORT`, but not before
        `_SHORT_ROUNDS` rounds.
        """
        batch = len(reached)
        place = (shape.depth - 1) * self.topk + shape.rank
        size = self.steps * self.topk
        sums = [np.bincount(place, amount.sum(axis=0), size) for amount in (reached, accepted)]
        now = np.stack(sums).reshape(2, self.steps, self.topk)
        self._long *= 0.5 ** (batch / _LONG)
        self._long += now
        self._short *= 0.5 ** min(batch / _SHORT, 1 / _SHORT_ROUNDS)
        self._short += now

    def forget(self, share: float) -> None:
        """A share of the sequences is new: so much of the short memory is about others."""
        self._short *= 1 - share

    def rates(self) -> Floats:
        """Acceptance of a child given its accepted parent now: [depth, rank].

        Prior of the long memory: rank r at depth 1 has 0.6 / 4^r, every deeper level 0.95 of the level above.
        """
        usual = expected = [_FIRST * _NEXT_RANK**rank for rank in range(self.topk)]
        now: list[list[float]] = []
        above: list[float] = []
        for tried, hits, lately, hits_lately in zip(*self._long.tolist(), *self._short.tolist(), strict=True):
            long = _shrunk(tried, hits, usual, _LONG_PRIOR)
            expected = long
            if now:
                expected = [
                    min(here * rate / was, CEILING) for here, rate, was in zip(long, now[-1], above, strict=True)
                ]
            now.append(_shrunk(lately, hits_lately, expected, _SHORT_PRIOR))
            usual, above = [_NEXT_DEPTH * rate for rate in long], long
        return np.array(now)


def _shrunk(tried: list[float], hits: list[float], prior: list[float], weight: float) -> list[float]:
    """hits / tried, pulled towards a prior that counts as `weight` tries; lists by rank, since they are short."""
    return [(h + weight * p) / (t + weight) for t, h, p in zip(tried, hits, prior, strict=True)]
