"""How many tokens a pass emits, by draft round and number of verified nodes: from calibrated looks, corrected by what was accepted.

A look at one draft round tells of every smaller one in it: of each the chance that its first, second, .. best node is accepted. Those
that are not in it are taken to move along. What rounds then bring corrects the sum, over all lately (another text) and for each arm in
the long run (a model that is wrong about it). The nodes of a chain are those of every longer chain, so each of them is corrected by
itself, for all chains together: what a short one would bring is known from the rounds of a long one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from trtllm_v4tree.runtime.costs import Arm
from trtllm_v4tree.runtime.policies.base import Candidates, Floats, Shape
from trtllm_v4tree.runtime.policies.rules import node_chances

_PRIOR, _MOST, _FORGET = 16.0, 256.0, 1 / 1024
_DOUBT = 0.3
_LATELY, _TRUSTING = 128.0, 24.0
_LONG, _STUBBORN, _STUBBORN_ROUNDS = 2048.0, 80.0, 24.0


class Lengths:
    """Starts from the engine's own `chances`. Arrays are [draft round, nodes - 1]; a draft round that has not so many nodes emits
    nothing."""

    def __init__(self, shapes: Sequence[Shape], max_nodes: int, chances: Mapping[Shape, Sequence[float]]) -> None:
        self.shapes, self.max_nodes = tuple(shapes), max_nodes
        self._place = {shape: index for index, shape in enumerate(self.shapes)}
        self._inside = {shape: self._smaller(shape) for shape in self.shapes}
        self._chances = np.zeros((len(self.shapes), max_nodes))
        self._possible = np.zeros(self._chances.shape, bool)
        for row, shape in enumerate(self.shapes):
            usual = chances[shape][:max_nodes]
            self._chances[row, : len(usual)] = usual
            self._possible[row, 1 : len(usual)] = True
        self._weight = np.full(len(self.shapes), _PRIOR)
        self.looks = 0
        self._seen = self._claimed = 0.0
        self._arms: dict[Arm, list[float]] = {}
        self._chains = np.array([topk == 1 for _, topk in self.shapes])[:, None]
        self._reached, self._expected = np.zeros(max_nodes), np.zeros(max_nodes)
        self._model = self._chances.cumsum(axis=1)

    def _smaller(self, shape: Shape) -> list[Shape]:
        return [s for s in self.shapes if s[0] <= shape[0] and s[1] <= shape[1]]

    def look(self, candidates: Candidates, probabilities: Floats, shape: Shape) -> None:
        """A draft round with the chance that each candidate is accepted, [B, C]."""
        batch, inside = len(probabilities), self._inside[shape]
        rows = [self._place[s] for s in inside]
        self._weight = np.maximum(self._weight * (1 - _FORGET * batch), _PRIOR)
        self._weight[rows] = np.minimum(self._weight[rows] + batch, _MOST)
        before = self._chances[self._place[shape]].sum() - 1
        seen = node_chances(candidates, probabilities, shape, inside, self.max_nodes)
        self._chances[rows] += (seen - self._chances[rows]) * (batch / self._weight[rows])[:, None]
        others = [row for row in range(len(self.shapes)) if row not in rows]
        self._chances[others, 1:] *= (self._chances[self._place[shape]].sum() - 1) / before
        self.looks += 1

    def doubts(self) -> Floats:
        """Of the logarithm of what a draft round brings: [S]."""
        return _DOUBT / np.sqrt(self._weight)

    def curves(self) -> Floats:
        """Tokens per sequence and pass: [S, N]."""
        self._model = self._chances.cumsum(axis=1)
        usual = _STUBBORN_ROUNDS * self._chances
        chains = self._chances * (self._reached + usual) / (self._expected + np.maximum(usual, 1e-9))
        chains[:, 0] = 1.0
        model = np.where(self._chains, chains.cumsum(axis=1), self._model)
        factors = np.full(self._model.shape, self._lately)
        for arm, (seen, claimed) in self._arms.items():
            assert arm.shape is not None
            factors[self._place[arm.shape], arm.nodes - 1] *= (seen + _STUBBORN) / (claimed + _STUBBORN)
        return np.where(self._possible, 1 + factors * (model - 1), 0.0)

    @property
    def _lately(self) -> float:
        return (self._seen + _TRUSTING) / (self._claimed + _TRUSTING)

    def see(self, arm: Arm, accepted: Sequence[int]) -> None:
        """So many drafted tokens were accepted in each walk through a tree of an arm."""
        assert arm.shape is not None
        row, walks, tokens = self._place[arm.shape], len(accepted), sum(accepted)
        claim, keep = walks * (float(self._model[row, arm.nodes - 1]) - 1), 0.5 ** (walks / _LONG)
        if arm.shape[1] == 1:
            self._see_chain(keep, walks * self._lately * self._chances[row, : arm.nodes], accepted)
        else:
            own = self._arms.setdefault(arm, [0.0, 0.0])
            own[0] = keep * own[0] + tokens
            own[1] = keep * own[1] + claim * self._lately
        self.forget(1 - 0.5 ** (walks / _LATELY))
        self._seen += tokens
        self._claimed += claim

    def _see_chain(self, keep: float, expected: Floats, accepted: Sequence[int]) -> None:
        """Node i is reached by the walks that accept i tokens or more; as many as `expected` were to."""
        nodes = len(expected)
        ends = np.bincount(accepted, minlength=nodes)[:nodes]
        self._reached[:nodes] = keep * self._reached[:nodes] + ends[::-1].cumsum()[::-1]
        self._expected[:nodes] = keep * self._expected[:nodes] + expected

    def forget(self, share: float) -> None:
        """A share of what was seen lately is about another text."""
        self._seen *= 1 - share
        self._claimed *= 1 - share
