"""Policies that weigh what a node brings against what it costs, by the engine's latency table and the drafter's own confidence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trtllm_v4tree.runtime.accept import Walk
from trtllm_v4tree.runtime.latency import LatencyTable
from trtllm_v4tree.runtime.policies.base import Candidates, Choice, Lists, Shape
from trtllm_v4tree.runtime.policies.rules import best_rate, expected_tokens, shared_budgets
from trtllm_v4tree.runtime.tree import Ints


class BestFirstPolicy:
    """Best-first by path confidence until the marginal gain is below the marginal cost (as BASTION).

    One draft round per batch size, the best one by the table; then each round as many nodes per sequence, best
    first, as give the most tokens per millisecond if the drafter's probabilities are right.
    """

    def __init__(self, shapes: Sequence[Shape], max_nodes: int, table: LatencyTable) -> None:
        self.shapes, self.max_nodes, self.table = tuple(shapes), max_nodes, table
        self._by_batch: dict[int, Shape] = {}
        self._current: Shape = self.shapes[0]

    def shape(self, batch: int) -> Shape | None:
        if batch not in self._by_batch:
            self._by_batch[batch] = best_static(self.shapes, self.table, batch, self.max_nodes)
        self._current = self._by_batch[batch]
        return self._current

    def choose(self, candidates: Candidates, rooms: Ints) -> Choice:
        batch = len(rooms)
        expected = expected_tokens(np.exp(candidates.scores.astype(np.float64)), self.max_nodes)
        nodes = best_rate(expected, self.table.target_curve(batch, len(expected)), self._fixed_ms(batch))
        return Choice(candidates.scores, np.minimum(rooms, nodes))

    def _fixed_ms(self, batch: int) -> float:
        return self.table.draft_ms(*self._current, batch) + self.table.overhead_ms(batch)

    def observe(self, candidates: Candidates, kept: Lists, visited: Walk) -> None:
        return None


class SharedBudgetPolicy(BestFirstPolicy):
    """Nodes of all sequences of a batch compete for one measured budget (as Bole): sure drafts get more of it than unsure ones."""

    def choose(self, candidates: Candidates, rooms: Ints) -> Choice:
        batch = len(rooms)
        probabilities = np.exp(candidates.scores.astype(np.float64))
        verify_ms = self.table.target_curve(batch, self.max_nodes)
        return Choice(
            candidates.scores, np.minimum(rooms, shared_budgets(probabilities, verify_ms, self._fixed_ms(batch)))
        )


def best_static(shapes: Sequence[Shape], table: LatencyTable, batch: int, max_nodes: int) -> Shape:
    """The draft round whose best nodes usually emit the most tokens per millisecond."""

    def rate(shape: Shape) -> float:
        lengths = np.cumsum(table.chances[shape][:max_nodes])
        fixed = table.draft_ms(*shape, batch) + table.overhead_ms(batch)
        return float((lengths / (fixed + table.target_curve(batch, len(lengths)))).max())

    return max(shapes, key=rate)
