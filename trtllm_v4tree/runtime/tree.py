"""Token trees: speculation names, ancestor matrices, node selection. Pure functions on arrays.

A batch of trees is `parents` [B, N]: parent index of each node, -1 for the root (node 0), -2 for padding; a parent precedes its children.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trtllm_v4tree.errors import RequestError

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
ROOT, PAD = -1, -2
_NAME = re.compile(r"s(\d+)_k(\d+)_d(\d+)")


@dataclass(frozen=True)
class Speculation:
    """`steps` draft steps, `topk` children per frontier node, `budget` verified tokens (root included)."""

    steps: int
    topk: int
    budget: int

    @property
    def name(self) -> str:
        return f"s{self.steps}_k{self.topk}_d{self.budget}"


def parse_speculation(name: str) -> Speculation | None:
    """`none` -> None, `sN_kK_dD` -> its numbers; anything else is a RequestError."""
    if name == "none":
        return None
    match = _NAME.fullmatch(name)
    if match is None:
        raise RequestError(
            f"speculation {name!r} is unknown: use none, auto or sN_kK_dD, for example s4_k3_d8 (tree) or s7_k1_d8 (chain)."
        )
    steps, topk, budget = map(int, match.groups())
    candidates = topk + (steps - 1) * topk * topk
    if steps < 1 or topk < 1 or budget < 2:
        raise RequestError(
            f"speculation {name!r} drafts nothing: steps and topk start at 1 and d at 2 (the root is counted)."
        )
    if budget - 1 > candidates:
        raise RequestError(
            f"speculation {name!r} verifies {budget - 1} drafted tokens but s{steps}_k{topk} drafts only {candidates}: use d{candidates + 1} or less."
        )
    return Speculation(steps, topk, budget)


def chain(batch: int, length: int) -> Ints:
    """Parents of a chain: [B, length]."""
    return np.broadcast_to(np.arange(-1, length - 1, dtype=np.int64), (batch, length))


def ancestors(parents: Ints) -> Bools:
    """Ancestor-or-self matrix [B, N, N]: [b, n, k] is true if k is n or an ancestor of n; padding has no ancestors."""
    batch, n = parents.shape
    if n == 1:
        return parents[:, :, None] != PAD
    if (parents[:, 1:] == np.arange(n - 1)).all():
        return np.broadcast_to(np.tri(n, dtype=bool), (batch, n, n))
    link = (parents[:, :, None] == np.arange(n)) | np.eye(n, dtype=bool)
    reach = link & (parents != PAD)[:, :, None]
    hops = 1
    while hops < n - 1:
        wider = np.matmul(reach, reach)
        if (wider == reach).all():
            break
        reach, hops = wider, 2 * hops
    return reach


def select_nodes(scores: NDArray[np.floating], parents: Ints, tokens: Ints, budgets: Ints) -> tuple[Ints, Ints, Ints]:
    """The best candidates of every sequence as a tree: candidates [B, C] by level -> candidate (-1 root, -2 padding), parent and
    token of each node [B, N], root at 0.

    Keeps `budgets[b] - 1` candidates by the strict total order (score, then depth, then index): a child never scores above its
    parent and never precedes it, so what is kept is closed under ancestors. The token of the root is left 0.
    """
    batch, count = scores.shape
    keep = min(int(budgets.max(initial=1)) - 1, count)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :keep]
    kept = np.where(np.arange(keep) < (budgets - 1)[:, None], order, count)
    kept.sort(axis=1)
    place = np.full((batch, count + 1), PAD, np.int64)
    rows = np.arange(batch)[:, None]
    place[rows, kept] = np.arange(1, keep + 1)
    place[:, count] = PAD
    real = kept < count
    source = np.minimum(kept, count - 1)
    up = parents[rows, source]
    linked = np.where(up < 0, 0, place[rows, np.maximum(up, 0)])
    tree = np.concatenate([np.full((batch, 1), ROOT, np.int64), np.where(real, linked, PAD)], axis=1)
    drafted = np.where(real, tokens[rows, source], 0)
    chosen = np.concatenate([np.full((batch, 1), ROOT, np.int64), np.where(real, kept, PAD)], axis=1)
    return chosen, tree, np.concatenate([np.zeros((batch, 1), np.int64), drafted], axis=1)
