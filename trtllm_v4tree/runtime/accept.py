"""Acceptance: which nodes of a verified tree the target's own tokens follow, and what they emit.

The rule: from the root, emit the token chosen there; while a child of the node carries that token, go on to the child
and emit the token chosen at it. Every visited node emits one token, the last of them being the bonus token.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

ROOT = -1
PADDING = -2


class Walk(NamedTuple):
    path: Ints  # [B, N] visited node ids from the root on, then -1
    counts: Ints  # [B] visited nodes = emitted tokens, bonus included; 0 for a row without a root
    emitted: Ints  # [B, N] the token chosen at each visited node, then -1


def walk(parents: Ints, tokens: Ints, chosen: Ints) -> Walk:
    """Follow each row's tree; all arguments are integers [B, N].

    parents: index of the parent node, `ROOT` for the root, `PADDING` for a node that is not there; a parent's index is
    lower than its children's. tokens: what each node carries. chosen: the target's token after each node.
    Of siblings that carry the same token the lowest index is taken.
    """
    rows = np.arange(parents.shape[0])[:, None]
    followed = (parents >= 0) & (tokens == chosen[rows, np.maximum(parents, 0)])
    path, counts = _start(parents)
    last = path[:, 0].tolist()
    depth = counts.tolist()
    for b, i in np.argwhere(followed).tolist():  # rising node index within a row, so parents come first
        if parents[b, i] == last[b]:
            path[b, depth[b]] = last[b] = i
            depth[b] += 1
    return Walk(path, np.array(depth, np.int64), np.where(path >= 0, chosen[rows, path], -1).astype(np.int64))


def walk_lazily(parents: Ints, tokens: Ints, choose: Callable[[Ints, Ints], Ints]) -> Walk:
    """The same as `walk`, with tokens chosen only where the walk comes by.

    choose(rows, nodes) returns the token of each (row, node) pair of two integer arrays [M]; called once per depth.
    Worth it where choosing is dear (sampling, logit edits): most nodes of a tree are not visited.
    """
    path, counts = _start(parents)
    emitted = np.full(parents.shape, -1, np.int64)
    rows = np.flatnonzero(counts)
    while rows.size:
        depth = int(counts[rows[0]]) - 1
        nodes = path[rows, depth]
        emitted[rows, depth] = token = choose(rows, nodes)
        fits = (parents[rows] == nodes[:, None]) & (tokens[rows] == token[:, None])
        goes_on = fits.any(axis=1)
        rows = rows[goes_on]
        path[rows, counts[rows]] = fits[goes_on].argmax(axis=1)
        counts[rows] += 1
    return Walk(path, counts, emitted)


def draft_paths(parents: Sequence[int], tokens: Sequence[int]) -> list[list[int]]:
    """Per node of one tree (lists of N), the draft tokens from below the root to the node.

    Empty for the root and padding: the root's token has been emitted (or is the prompt's last) already.
    """
    paths: list[list[int]] = []
    for parent, token in zip(parents, tokens, strict=True):
        paths.append([*paths[parent], token] if parent >= 0 else [])
    return paths


def _start(parents: Ints) -> tuple[Ints, Ints]:
    is_root = parents == ROOT
    path = np.full(parents.shape, -1, np.int64)
    counts = is_root.any(axis=1).astype(np.int64)
    path[:, 0] = np.where(counts > 0, is_root.argmax(axis=1), -1)
    return path, counts
