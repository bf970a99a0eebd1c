"""Token trees: speculation names, ancestors, node selection. Pure functions.

A tree is the parents of its nodes: parent index, -1 for the root (node 0), -2 for padding; a parent precedes its children. Trees have
a handful of nodes, so they are tuples and lists: at these sizes a NumPy call costs more than the loop that it saves.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from trtllm_v4tree.errors import RequestError

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
ROOT, PAD = -1, -2
_TREES, _TREE_WIDTH = 512, 32
_CHUNKS, _CHUNK_WIDTH = 16, 128
F = TypeVar("F", bound=Callable[..., Any])
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


@dataclass(frozen=True, eq=False)
class TreeShape:
    """What the parents of one tree of N nodes determine; padding has no depth, no ancestors and not even itself."""

    parents: tuple[int, ...]
    depth: tuple[int, ...]
    height: int
    """Nodes on the longest path."""
    reach: Bools
    """[N, N]: [n, k] is true if k is n or an ancestor of n."""

    def __len__(self) -> int:
        return len(self.parents)


def remembered(make: F) -> F:
    """Caches a pure function whose first argument is a tree or a path: few shapes come again and again. Nobody may write to what it
    returns. Of wide ones (prefill chunks, whose masks are large) few are kept, of very wide ones none.
    """
    trees, chunks = (functools.lru_cache(maxsize=count)(make) for count in (_TREES, _CHUNKS))

    def call(nodes: TreeShape | tuple[int, ...], *args: Any) -> Any:
        width = len(nodes)
        return (trees if width <= _TREE_WIDTH else chunks if width <= _CHUNK_WIDTH else make)(nodes, *args)

    return cast(F, functools.wraps(make)(call))


@remembered
def tree_shape(parents: tuple[int, ...]) -> TreeShape:
    """Depths and ancestors of a tree; a parent precedes its children."""
    reach = np.zeros((len(parents), len(parents)), bool)
    depth = [0] * len(parents)
    for node, parent in enumerate(parents):
        if parent >= 0:
            reach[node] = reach[parent]
            depth[node] = depth[parent] + 1
        reach[node, node] = parent != PAD
    return TreeShape(parents, tuple(depth), 1 + max(depth), reach)


def chain_shape(length: int) -> TreeShape:
    """A chain of `length` nodes."""
    return tree_shape(tuple(range(-1, length - 1)))


class Selected(NamedTuple):
    """The best candidates of every sequence as a tree, lists [B][N]: candidate (-1 root, -2 padding), parent and token of each node."""

    candidates: list[list[int]]
    parents: list[list[int]]
    tokens: list[list[int]]


def select_nodes(
    scores: NDArray[np.floating], parents: Ints, tokens: Ints, budgets: Ints, roots: list[int]
) -> Selected:
    """Keeps the `budgets[b] - 1` best candidates [B, C] by level under the token `roots[b]`.

    By the strict total order (score, then depth, then index): a child never scores above its parent and never precedes it, so what is
    kept is closed under ancestors.
    """
    keep = [min(budget - 1, scores.shape[1]) for budget in budgets.tolist()]
    selected = Selected([], [], [])
    lines = zip((-scores).tolist(), parents.tolist(), tokens.tolist(), keep, roots, strict=True)
    for cost, up, token, count, root in lines:
        kept = sorted(sorted(range(len(cost)), key=cost.__getitem__)[:count])
        node_of = {ROOT: 0} | {candidate: node for node, candidate in enumerate(kept, 1)}
        padding = [PAD] * (max(keep) - count)
        selected.candidates.append([ROOT, *kept, *padding])
        selected.parents.append([ROOT, *(node_of[up[c]] for c in kept), *padding])
        selected.tokens.append([root, *(token[c] for c in kept), *([0] * len(padding))])
    return selected
