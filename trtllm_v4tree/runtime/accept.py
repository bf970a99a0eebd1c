"""Acceptance: which nodes of a verified tree the target's own tokens follow, and what they emit.

The rule: from the root, emit the token chosen there; while a child of the node carries that token, go on to the child
and emit the token chosen at it. Every visited node emits one token, the last of them being the bonus token.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Lists = Sequence[Sequence[int]]

ROOT = -1


class Walk(NamedTuple):
    """What a walk through B trees of N nodes visited and emitted, as lists; as padded arrays for whoever counts."""

    paths: list[list[int]]
    """Visited node ids of each tree from the root on; none for a tree without a root."""
    runs: list[list[int]]
    """The token chosen at each visited node, bonus included; one less than nodes where a choice did not stand."""
    nodes: int

    @property
    def path(self) -> Ints:
        """[B, N] visited node ids, then -1."""
        return _padded(self.paths, self.nodes)

    @property
    def emitted(self) -> Ints:
        """[B, N] the token chosen at each visited node, then -1."""
        return _padded(self.runs, self.nodes)

    @property
    def counts(self) -> Ints:
        """[B] emitted tokens."""
        return np.array([len(run) for run in self.runs], np.int64)


def walk(parents: Lists, tokens: Lists, chosen: Lists) -> Walk:
    """Follow each row's tree; all arguments are integers [B][N].

    parents: index of the parent node, -1 for the root, -2 for a node that is not there; a parent's index is lower than
    its children's. tokens: what each node carries. chosen: the target's token after each node.
    Of siblings that carry the same token the lowest index is taken. A loop of its own: `walk_lazily` takes three times as long.
    """
    visited = Walk([], [], len(parents[0]))
    for up, carried, own in zip(parents, tokens, chosen, strict=True):
        path, run = list[int](), list[int]()
        node = up.index(ROOT) if ROOT in up else None
        while node is not None:
            path.append(node)
            run.append(own[node])
            node = _child(up, carried, node, own[node])
        visited.paths.append(path)
        visited.runs.append(run)
    return visited


def walk_lazily(parents: Lists, tokens: Lists, choose: Callable[[list[int], list[int]], Sequence[int | None]]) -> Walk:
    """The same, with tokens chosen only where the walk comes by.

    choose(rows, nodes) returns the token of each (row, node) pair of two lists, None where a choice does not stand: the
    walk ends there without a token. It is called once per depth. Worth it where choosing is dear (sampling, logit edits):
    most nodes of a tree are not visited.
    """
    paths = [[up.index(ROOT)] if ROOT in up else [] for up in parents]
    runs: list[list[int]] = [[] for _ in parents]
    rows = [b for b, path in enumerate(paths) if path]
    while rows:
        further = []
        for b, token in zip(rows, choose(rows, [paths[b][-1] for b in rows]), strict=True):
            if token is None:
                continue
            runs[b].append(token)
            child = _child(parents[b], tokens[b], paths[b][-1], token)
            if child is not None:
                paths[b].append(child)
                further.append(b)
        rows = further
    return Walk(paths, runs, len(parents[0]))


def _child(parents: Sequence[int], tokens: Sequence[int], node: int, token: int) -> int | None:
    for child in range(node + 1, len(parents)):
        if parents[child] == node and tokens[child] == token:
            return child
    return None


def draft_paths(parents: Sequence[int], tokens: Sequence[int]) -> list[list[int]]:
    """Per node of one tree (lists of N), the draft tokens from below the root to the node.

    Empty for the root and padding: the root's token has been emitted (or is the prompt's last) already.
    """
    paths: list[list[int]] = []
    for parent, token in zip(parents, tokens, strict=True):
        paths.append([*paths[parent], token] if parent >= 0 else [])
    return paths


def _padded(lines: list[list[int]], width: int) -> Ints:
    return np.array([[*line, *[-1] * (width - len(line))] for line in lines], np.int64).reshape(len(lines), width)
