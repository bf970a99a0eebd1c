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
        reached, accepted = self._long
        short_reached, short_accepted = self._short
        long, now = np.empty_like(reached), np.empty_like(reached)
        usual = expected = _FIRST * _NEXT_RANK ** np.arange(self.topk)
        for depth in range(self.steps):
            long[depth] = (accepted[depth] + _LONG_PRIOR * usual) / (reached[depth] + _LONG_PRIOR)
            expected = (
                long[depth] if depth == 0 else np.minimum(long[depth] * now[depth - 1] / long[depth - 1], CEILING)
            )
            now[depth] = (short_accepted[depth] + _SHORT_PRIOR * expected) / (short_reached[depth] + _SHORT_PRIOR)
            usual = _NEXT_DEPTH * long[depth]
        return now
