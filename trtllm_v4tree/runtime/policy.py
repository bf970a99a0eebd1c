"""Which tree to draft and how much of it to verify: small policies behind one interface. No policy changes any text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from trtllm_v4tree.runtime.accept import Walk
from trtllm_v4tree.runtime.calibration import Calibration, CandidateShape, expected_lengths
from trtllm_v4tree.runtime.latency import LatencyTable
from trtllm_v4tree.runtime.tree import Ints, Speculation

Floats = NDArray[np.float64]


class Candidates(NamedTuple):
    """A draft round's candidates by level, [B, C]: parent candidate (-1 root), token, cumulative log-probability."""

    parents: Ints
    tokens: Ints
    scores: NDArray[np.floating]


class Choice(NamedTuple):
    """What to verify: the `budgets[b]` best nodes (root included) by `scores` [B, C], which never rise from parent to child."""

    scores: NDArray[np.floating]
    budgets: Ints


class Policy(Protocol):
    """`shape` is asked before a draft round, `choose` after it, `observe` after acceptance; no tree has more than `max_nodes`."""

    max_nodes: int

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Every draft round it may ask for."""
        ...

    def shape(self, batch: int) -> tuple[int, int] | None: ...

    def choose(self, candidates: Candidates, rooms: Ints) -> Choice: ...

    def observe(self, candidates: Candidates, kept: Ints, visited: Walk) -> None: ...


class FixedPolicy:
    """Always the shape it was given (the paper's)."""

    def __init__(self, speculation: Speculation) -> None:
        self.speculation = speculation
        self.shapes = ((speculation.steps, speculation.topk),)
        self.max_nodes = speculation.budget

    def shape(self, batch: int) -> tuple[int, int] | None:
        return self.shapes[0]

    def choose(self, candidates: Candidates, rooms: Ints) -> Choice:
        return Choice(candidates.scores, np.minimum(rooms, self.speculation.budget))

    def observe(self, candidates: Candidates, kept: Ints, visited: Walk) -> None:
        return None


class AutoPolicy:
    """Most expected tokens per second, from the engine's latency table and acceptance rates learnt online.

    Every `plan_every` rounds the shape: the best (steps, topk, budget) of the static trees under the learnt rates, or plain decoding. After the
    draft the budget: nodes of all sequences ranked by calibrated path probability, as many as pay for themselves. Every
    `explore_every` rounds the widest affordable shape keeps the rates of deeper levels alive.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, int]],
        table: LatencyTable,
        max_nodes: int,
        plan_every: int = 32,
        explore_every: int = 96,
    ) -> None:
        self.shapes, self.table, self.max_nodes = tuple(shapes), table, max_nodes
        self.plan_every, self.explore_every = plan_every, explore_every
        self.calibration = Calibration()
        self._rounds = 0
        self._plans: dict[int, tuple[int, int] | None] = {}
        self._current: tuple[int, int] = self.shapes[0]

    def shape(self, batch: int) -> tuple[int, int] | None:
        self._rounds += 1
        if self._rounds % self.plan_every == 0:
            self._plans.clear()
        if batch not in self._plans:
            self._plans[batch] = best_shape(self.shapes, self.calibration.rates(), self.table, batch, self.max_nodes)
        plan = self._plans[batch]
        if self._rounds % self.explore_every == 0:
            plan = max(self.shapes, key=lambda s: s[0] * s[1])
        if plan is not None:
            self._current = plan
        return plan

    def choose(self, candidates: Candidates, rooms: Ints) -> Choice:
        shape = CandidateShape.of(*self._current)
        scores = path_scores(candidates, self.calibration.scores(local_scores(candidates), shape))
        budget = best_budget(np.exp(scores), self.table, self._current, self.max_nodes)
        return Choice(scores, np.minimum(rooms, budget))

    def observe(self, candidates: Candidates, kept: Ints, visited: Walk) -> None:
        """kept [B, N]: candidate of each verified node (-1 root, -2 padding); visited: which nodes were accepted."""
        shape = CandidateShape.of(*self._current)
        local = np.exp(local_scores(candidates))
        b, n = np.nonzero(kept >= 0)
        candidate = kept[b, n]
        accepted = np.zeros(candidates.tokens.shape, bool)
        vb, vt = np.nonzero(visited.path > 0)
        accepted[vb, kept[vb, visited.path[vb, vt]]] = True
        parent = candidates.parents[b, candidate]
        reached = (parent < 0) | accepted[b, np.maximum(parent, 0)]
        b, candidate = b[reached], candidate[reached]
        self.calibration.update(
            shape.depth[candidate], shape.rank[candidate], local[b, candidate], accepted[b, candidate]
        )


def local_scores(candidates: Candidates) -> Floats:
    """Log-probability of each candidate given its parent: [B, C]."""
    rows = np.arange(len(candidates.scores))[:, None]
    above = np.where(candidates.parents >= 0, candidates.scores[rows, np.maximum(candidates.parents, 0)], 0.0)
    return (candidates.scores - above).astype(np.float64)


def path_scores(candidates: Candidates, local: Floats) -> Floats:
    """Sums local log-probabilities along paths; parents precede their children: [B, C]."""
    rows = np.arange(len(local))[:, None]
    total, hop = local.copy(), candidates.parents.copy()
    while (hop >= 0).any():
        total += np.where(hop >= 0, local[rows, np.maximum(hop, 0)], 0.0)
        hop = np.where(hop >= 0, candidates.parents[rows, np.maximum(hop, 0)], -1)
    return total


def best_shape(
    shapes: Sequence[tuple[int, int]], rates: Floats, table: LatencyTable, batch: int, max_nodes: int
) -> tuple[int, int] | None:
    """The draft shape with the most expected tokens per millisecond; None where plain decoding is at least as fast."""
    overhead = table.overhead_ms(batch)
    best, plan = 1.0 / (table.target_ms(batch, 1) + overhead), None
    for steps, topk in shapes:
        cost = table.draft_ms(steps, topk, batch) + overhead
        lengths = expected_lengths(rates, steps, topk, max_nodes)
        value = max(x / (cost + table.target_ms(batch, n)) for n, x in enumerate(lengths, 1))
        if value > best:
            best, plan = value, (steps, topk)
    return plan


def best_budget(probabilities: Floats, table: LatencyTable, shape: tuple[int, int], max_nodes: int) -> int:
    """Nodes per sequence that maximise expected tokens per millisecond: probabilities [B, C] of each candidate's whole path."""
    batch, count = probabilities.shape
    limit = min(max_nodes, count + 1)
    ranked = -np.sort(-probabilities, axis=1)[:, : limit - 1]
    expected = batch + np.concatenate([[0.0], np.cumsum(ranked.sum(axis=0))])
    fixed = table.draft_ms(*shape, batch) + table.overhead_ms(batch)
    cost = np.array([fixed + table.target_ms(batch, n) for n in range(1, limit + 1)])
    return int(np.argmax(expected / cost)) + 1
