"""The decisions as pure functions: arrays in, budgets or shapes out. No state, no clock."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trtllm_v4tree.runtime.calibration import CandidateShape
from trtllm_v4tree.runtime.policies.base import Candidates, Floats, Shape
from trtllm_v4tree.runtime.tree import Ints


def above(parents: Ints, values: Floats, root: float) -> Floats:
    """The value of each candidate's parent, `root` for those of the first level: [B, C]."""
    batch, count = values.shape
    padded = np.empty((batch, count + 1))
    padded[:, :count], padded[:, count] = values, root
    return padded[np.arange(batch)[:, None], parents]  # parent -1 is the last column


def local_scores(candidates: Candidates) -> Floats:
    """Log-probability of each candidate given its parent: [B, C]."""
    return candidates.scores - above(candidates.parents, candidates.scores.astype(np.float64), 0.0)


def path_scores(parents: Ints, local: Floats, shape: Shape) -> Floats:
    """Sums local log-probabilities [B, C] along the paths of a draft round of `shape`, level after level."""
    steps, topk = shape
    total, rows = local.copy(), np.arange(len(local))[:, None]
    for first in range(topk, topk + (steps - 1) * topk * topk, topk * topk):
        level = slice(first, first + topk * topk)
        total[:, level] += total[rows, parents[:, level]]
    return total


def expected_tokens(probabilities: Floats, max_nodes: int) -> Floats:
    """Tokens that a batch emits when every sequence verifies its 1, 2, .. best nodes: path probabilities [B, C] -> [n]."""
    batch, count = probabilities.shape
    ranked = -np.sort(-probabilities, axis=1)[:, : min(max_nodes - 1, count)]
    return batch + np.concatenate([[0.0], np.cumsum(ranked.sum(axis=0))])


def best_rate(expected: Floats, verify_ms: Floats, fixed_ms: float) -> int:
    """Nodes per sequence with the most tokens per millisecond: `expected` [n] and `verify_ms` [n] for 1, 2, .. nodes."""
    return int(np.argmax(expected / (fixed_ms + verify_ms))) + 1


def shared_budgets(probabilities: Floats, verify_ms: Floats, fixed_ms: float) -> Ints:
    """Nodes of each sequence [B] when those of all compete for one budget: path probabilities [B, C], cost by nodes per sequence [n].

    Candidates of the whole batch are taken in falling order, as many as give the most expected tokens per millisecond. A pass counts
    as what it costs with the same number of nodes spread evenly; an engine that pads to the widest tree needs somewhat longer.
    """
    batch, count = probabilities.shape
    width = min(len(verify_ms) - 1, count)
    best = -np.sort(-probabilities, axis=1)[:, :width]
    order = np.argsort(-best, axis=None, kind="stable")
    expected = batch + np.concatenate([[0.0], np.cumsum(best.ravel()[order])])
    nodes = 1 + np.arange(len(order) + 1) / batch
    cost = fixed_ms + np.interp(nodes, np.arange(1, len(verify_ms) + 1), verify_ms)
    taken = order[: int(np.argmax(expected / cost))]
    return 1 + np.bincount(taken // width, minlength=batch).astype(np.int64)


def node_chances(
    candidates: Candidates, probabilities: Floats, shape: Shape, inside: Sequence[Shape], max_nodes: int
) -> Floats:
    """Mean chance that the root, the first, second, .. best node by the drafter's scores is accepted, for every draft round of `inside`
    as a part of that of `shape`: path probabilities [B, C] -> [len(inside), max_nodes]. Nodes that there are not have none.
    """
    order = np.argsort(-candidates.scores, axis=1, kind="stable")
    depth = CandidateShape.of(*shape).depth[order]
    width = np.take_along_axis(_widths(candidates.parents, shape), order, axis=1)
    ranked = np.take_along_axis(probabilities, order, axis=1)
    chances = np.zeros((len(inside), max_nodes))
    for row, (steps, topk) in zip(chances, inside, strict=True):
        within = (depth <= steps) & (width <= topk)
        place = within.cumsum(axis=1)
        within &= place < max_nodes
        row += np.bincount(place[within], ranked[within], max_nodes)
    chances[:, 0] = len(ranked)
    return chances / len(ranked)


def _widths(parents: Ints, shape: Shape) -> Ints:
    """The topk that a draft round needs to propose each candidate: one more than the highest child rank on its path, [B, C]."""
    steps, topk = shape
    widths, rows = np.tile(1 + CandidateShape.of(*shape).rank, (len(parents), 1)), np.arange(len(parents))[:, None]
    for first in range(topk, topk + (steps - 1) * topk * topk, topk * topk):
        level = slice(first, first + topk * topk)
        widths[:, level] = np.maximum(widths[:, level], widths[rows, parents[:, level]])
    return widths


def entropy(log_probs: Floats) -> Floats:
    """Entropy in nats of the first level [B, K], what is not among its K tokens counted as one more: [B]."""
    p = np.exp(log_probs)
    rest = np.clip(1 - p.sum(axis=1), 1e-9, 1.0)
    return -(p * log_probs).sum(axis=1) - rest * np.log(rest)


def limited(candidates: Candidates, shape: Shape, depths: Ints, widths: Ints) -> tuple[Floats, Ints]:
    """Scores [B, C] with -inf where a path goes deeper than `depths[b]` or by a child of rank `widths[b]` or more (from 0); how many
    nodes that leaves, root included [B]."""
    places = CandidateShape.of(*shape)
    inside = (places.depth <= depths[:, None]) & (places.rank < widths[:, None])
    barred = path_scores(candidates.parents, np.where(inside, 0.0, -np.inf), shape)
    return candidates.scores + barred, 1 + np.isfinite(barred).sum(axis=1)


def nearest(shapes: Sequence[Shape], steps: int, topk: int) -> Shape:
    """Of the shapes built, the nearest: depth first, then width, then the smaller."""
    return min(shapes, key=lambda s: (abs(s[0] - steps), abs(s[1] - topk), s))
