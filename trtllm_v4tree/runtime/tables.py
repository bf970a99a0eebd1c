"""Row tables and masks of a pass: where every key, pooled row and committed row lies. Pure integer arithmetic on a batch.

Conventions (see `contract.py`): pools have row 0 = zero row; window ring row = 1 + slot * W + position % W; entry row =
1 + page * rows + index in page; slot 0 and page 0 are the bin. Compressed rows pooled for a CSA entry: 0 prev A, 1 cur A, 2 cur B,
3 null, 4 + 2 n + half; for HCA: 0 the open window, 1 null, 2 + n.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trtllm_v4tree.runtime.tree import PAD, Bools, Ints, ancestors, paths
from trtllm_v4tree.sizes import EngineSizes

Floats = NDArray[np.float32]
Feeds = dict[str, NDArray[np.int64] | NDArray[np.float32]]
_HIDDEN = np.float32(-np.inf)
PREV_A, CUR_A, CUR_B, CSA_NULL, CSA_NODES = 0, 1, 2, 3, 4
HCA_OPEN, HCA_NULL, HCA_NODES = 0, 1, 2


@dataclass(frozen=True)
class Sequences:
    """Committed state of the sequences of a batch: slots [B], lengths [B] (tokens committed), page table [B, pages]."""

    slots: Ints
    lengths: Ints
    pages: Ints


@dataclass(frozen=True)
class Tree:
    """A batch of trees with what is derived from the parents once: all [B, N] or [B, N, ..]."""

    parents: Ints
    tokens: Ints
    reach: Bools
    depth: Ints
    path: Ints

    @classmethod
    def make(cls, parents: Ints, tokens: Ints) -> Tree:
        reach = ancestors(parents)
        depth = np.maximum(reach.sum(axis=2) - 1, 0)
        return cls(parents, tokens, reach, depth, paths(reach, depth))

    @property
    def real(self) -> Bools:
        return self.parents != PAD


def additive(visible: Bools) -> Floats:
    """0 where visible, -inf elsewhere."""
    return np.where(visible, np.float32(0), _HIDDEN)


def window_positions(lengths: Ints, window: int) -> Ints:
    """Committed positions that any new node may see, newest first: [B, Wn], negative where there is none."""
    width = int(min(lengths.max(initial=0), window - 1))
    return lengths[:, None] - 1 - np.arange(width)


def ring_rows(slots: Ints, positions: Ints, window: int) -> Ints:
    """Rows of the window pool for positions [B, X]; row 0 (zero row) where the position is negative."""
    rows = 1 + slots[:, None] * window + positions % window
    return np.where(positions >= 0, rows, 0)


def window_tables(seqs: Sequences, window: int) -> tuple[Ints, Ints]:
    """`window_rows` [B, 1 + Wn] (the sink's zero row first) and the positions of all but the first."""
    held = window_positions(seqs.lengths, window)
    rows = ring_rows(seqs.slots, held, window)
    return np.concatenate([np.zeros((len(rows), 1), np.int64), rows], axis=1), held


def window_mask(held: Ints, positions: Ints, reach: Bools, window: int) -> Bools:
    """What rows at `positions` [B, N] see of [sink | held window rows | each other]: [B, N, 1 + Wn + N]."""
    ages = positions[:, :, None] - held[:, None, :]
    ring = (ages < window) & (held >= 0)[:, None, :]
    nodes = reach & (positions[:, :, None] - positions[:, None, :] < window)
    sink = np.ones((*positions.shape, 1), bool)
    return np.concatenate([sink, ring, nodes], axis=2)


def entry_rows(pages: Ints, counts: Ints, page_rows: int) -> Ints:
    """Rows of the entry pool of entries 0 .. counts - 1: [B, max count], row 0 where there is none."""
    index = np.arange(int(counts.max(initial=0)))
    rows = 1 + pages[:, index // page_rows] * page_rows + index % page_rows
    return np.where(index < counts[:, None], rows, 0)


def boundary_nodes(tree: Tree, positions: Ints, ratio: int) -> tuple[Ints, Bools]:
    """Nodes that complete a window, in node order: ids [B, M] and whether each is real."""
    ends = ((positions + 1) % ratio == 0) & tree.real
    most = int(ends.sum(axis=1).max(initial=0))
    nodes = np.argsort(~ends, axis=1, kind="stable")[:, :most]
    return nodes, np.take_along_axis(ends, nodes, axis=1)


def path_rows(tree: Tree, nodes: Ints, first: Ints, count: int, base: int, stride: int, null: int) -> Ints:
    """Rows of the path of `nodes` [B, M] at depths first .. first + count - 1 (`first` [B, M]); null outside the path: [B, M, count]."""
    depth = first[:, :, None] + np.arange(count)
    inside = (depth >= 0) & (depth < tree.path.shape[2])
    line = np.take_along_axis(tree.path, nodes[:, :, None], axis=1)
    node = np.take_along_axis(line, np.where(inside, depth, 0), axis=2)
    return np.where(inside & (node >= 0), base + stride * node, null)


def csa_pool_table(tree: Tree, nodes: Ints, window: Ints, lengths: Ints, ratio: int) -> Ints:
    """Rows pooled into the entry of CSA window `window` [B, M] by boundary `nodes` [B, M]: [B, M, 2 ratio] (A half, B half)."""
    start = window * ratio - lengths[:, None]
    a = path_rows(tree, nodes, start - ratio, ratio, CSA_NODES, 2, CSA_NULL)
    b = path_rows(tree, nodes, start, ratio, CSA_NODES + 1, 2, CSA_NULL)
    open_window = (lengths // ratio)[:, None]
    a[:, :, 0] = np.where(start - ratio < 0, np.where(window == open_window, PREV_A, CUR_A), a[:, :, 0])
    b[:, :, 0] = np.where(start < 0, CUR_B, b[:, :, 0])
    return np.concatenate([a, b], axis=2)


def hca_pool_table(tree: Tree, nodes: Ints, window: Ints, lengths: Ints, ratio: int) -> Ints:
    """Rows pooled into the entry of HCA window `window` by boundary `nodes`: [B, M, 1 + T], the open window first."""
    start = window * ratio - lengths[:, None]
    width = min(ratio, tree.path.shape[2])
    rows = path_rows(tree, nodes, np.maximum(start, 0), width, HCA_NODES, 1, HCA_NULL)
    held = np.where(start < 0, HCA_OPEN, HCA_NULL)
    return np.concatenate([held[:, :, None], rows], axis=2)


@dataclass(frozen=True)
class StepTables:
    """Feeds of one target step, and what its commit needs again."""

    feeds: Feeds
    seqs: Sequences
    tree: Tree
    positions: Ints
    boundaries: dict[str, tuple[Ints, Bools]]


def step_tables(sizes: EngineSizes, seqs: Sequences, tree: Tree, logit_nodes: Ints) -> StepTables:
    """All inputs of `target_step` but the states."""
    positions = seqs.lengths[:, None] + tree.depth
    rows, held = window_tables(seqs, sizes.window)
    feeds: Feeds = {
        "token_ids": tree.tokens,
        "positions": positions,
        "logit_nodes": logit_nodes,
        "slots": seqs.slots,
        "window_rows": rows,
        "node_mask": additive(window_mask(held, positions, tree.reach, sizes.window)),
    }
    boundaries = {}
    for kind, ratio, page_rows, present in _kinds(sizes):
        if present:
            boundaries[kind] = boundary_nodes(tree, positions, ratio)
            feeds.update(_entry_feeds(kind, ratio, page_rows, seqs, tree, positions, *boundaries[kind]))
    return StepTables(feeds, seqs, tree, positions, boundaries)


def _kinds(sizes: EngineSizes) -> tuple[tuple[str, int, int, int], ...]:
    return (
        ("csa", sizes.csa_ratio, sizes.csa_page_rows, sizes.num_csa),
        ("hca", sizes.hca_ratio, sizes.hca_page_rows, sizes.num_hca),
    )


def _entry_feeds(
    kind: str, ratio: int, page_rows: int, seqs: Sequences, tree: Tree, positions: Ints, nodes: Ints, real: Bools
) -> Feeds:
    counts = seqs.lengths // ratio
    rows = entry_rows(seqs.pages, counts, page_rows)
    window = np.take_along_axis(positions, nodes, axis=1) // ratio
    pool = csa_pool_table if kind == "csa" else hca_pool_table
    committed = (np.arange(rows.shape[1]) < counts[:, None])[:, None, :]
    committed = np.broadcast_to(committed, (*positions.shape, rows.shape[1]))
    branch = np.take_along_axis(tree.reach, nodes[:, None, :], axis=2) & real[:, None, :]
    return {
        f"{kind}_rows": rows,
        f"{kind}_pool_table": pool(tree, nodes, window, seqs.lengths, ratio),
        f"{kind}_entry_positions": window * ratio,
        f"{kind}_mask": additive(np.concatenate([committed, branch], axis=2)),
    }


def commit_tables(sizes: EngineSizes, step: StepTables, path: Ints, counts: Ints) -> Feeds:
    """Inputs of `commit` for accepted node ids `path` [B, T] of which the first `counts` [B] are kept (law 2)."""
    seqs, n = step.seqs, step.tree.parents.shape[1]
    kept = np.arange(path.shape[1]) < counts[:, None]
    b, t = np.nonzero(kept)
    position = seqs.lengths[b] + t
    last = (seqs.lengths + counts)[b]
    ring = 1 + seqs.slots[b] * sizes.window + position % sizes.window
    feeds: Feeds = {
        "slots": seqs.slots,
        "accepted": b * n + path[b, t],
        "window_dst": np.where(position >= last - sizes.window, ring, 1),
    }
    if sizes.has_mtp:
        feeds["stream_dst"] = 1 + seqs.slots[b] * sizes.max_commit + t
    chosen = np.take_along_axis(path, np.maximum(counts - 1, 0)[:, None], axis=1)
    tip = np.where(counts[:, None] > 0, chosen, 0)
    for kind, ratio, page_rows, present in _kinds(sizes):
        if present:
            fold = _csa_fold if kind == "csa" else _hca_fold
            feeds[f"{kind}_fold_table"] = fold(step.tree, tip, seqs.lengths, counts, ratio)
            feeds.update(_emitted(kind, ratio, page_rows, step, path, kept))
    return feeds


def _emitted(kind: str, ratio: int, page_rows: int, step: StepTables, path: Ints, kept: Bools) -> Feeds:
    """Accepted boundary nodes and the entry rows they go to."""
    nodes, real = step.boundaries[kind]
    seqs = step.seqs
    accepted = np.zeros((*step.tree.parents.shape,), bool)
    b, t = np.nonzero(kept)
    accepted[b, path[b, t]] = True
    b, m = np.nonzero(np.take_along_axis(accepted, nodes, axis=1) & real)
    entry = step.positions[b, nodes[b, m]] // ratio
    page = seqs.pages[b, entry // page_rows]
    return {
        f"{kind}_emitted": b * nodes.shape[1] + m,
        f"{kind}_dst": 1 + page * page_rows + entry % page_rows,
    }


def _csa_fold(tree: Tree, tip: Ints, lengths: Ints, counts: Ints, ratio: int) -> Ints:
    """Rows of the new prev A, cur A, cur B after committing `counts` nodes that end at `tip` [B, 1]: [B, 3, 1 + ratio]."""
    length = lengths[:, None]
    end = length + counts[:, None]
    old, new = length // ratio, end // ratio
    shape = (len(lengths), 3, 1 + ratio)
    table = np.full(shape, CSA_NULL, np.int64)
    for row, (window, half) in enumerate(((new - 1, 0), (new, 0), (new, 1))):
        first = window * ratio - length
        table[:, row, 1:] = _limited(tree, tip, first, counts, ratio, CSA_NODES + half, 2, CSA_NULL)[:, 0]
        current = CUR_B if half else CUR_A
        held = np.where(window == old, current, np.where(window == old - 1, PREV_A, CSA_NULL))
        table[:, row, 0] = (held if row == 0 else np.where(window == old, current, CSA_NULL))[:, 0]
    return table


def _hca_fold(tree: Tree, tip: Ints, lengths: Ints, counts: Ints, ratio: int) -> Ints:
    """Rows of the new open window: [B, 1, 1 + T]."""
    length = lengths[:, None]
    end = length + counts[:, None]
    window = end // ratio
    first = np.maximum(window * ratio - length, 0)
    width = min(ratio, tree.path.shape[2])
    rows = _limited(tree, tip, first, counts, width, HCA_NODES, 1, HCA_NULL)
    held = np.where(window == length // ratio, HCA_OPEN, HCA_NULL)
    return np.concatenate([held[:, :, None], rows], axis=2)


def _limited(tree: Tree, tip: Ints, first: Ints, counts: Ints, width: int, base: int, stride: int, null: int) -> Ints:
    """`path_rows` of the tip, cut to the accepted depths."""
    rows = path_rows(tree, tip, first, width, base, stride, null)
    depth = first[:, :, None] + np.arange(width)
    return np.where(depth < counts[:, None, None], rows, null)


def draft_tables(
    sizes: EngineSizes, seqs: Sequences, pending: Ints, next_tokens: Ints, steps: int
) -> tuple[Feeds, Ints]:
    """Inputs of `draft_round` but the states, and `read`: flat indices of the real catch-up rows.

    pending [B]: accepted rows the drafter has not read, the newest at position lengths - 1; next_tokens [B, S] left aligned.
    """
    width = next_tokens.shape[1]
    index = np.arange(width)
    start = seqs.lengths - pending
    real = index < pending[:, None]
    positions = np.where(real, start[:, None] + index, start[:, None])
    drafter = Sequences(seqs.slots, start, seqs.pages)
    rows, held = window_tables(drafter, sizes.window)
    reach = np.tri(width, dtype=bool) & real[:, None, :]
    feeds: Feeds = {
        "stream_rows": np.where(real, 1 + seqs.slots[:, None] * sizes.max_commit + index, 0),
        "next_tokens": np.where(real, next_tokens, 0),
        "positions": positions,
        "mtp_window_rows": rows,
        "catchup_mask": additive(window_mask(held, positions, reach, sizes.window)),
    }
    if steps:
        feeds["last_row"] = (pending - 1)[:, None]
        feeds["root_position"] = seqs.lengths[:, None]
    if steps > 1:
        level = seqs.lengths[:, None] + np.arange(steps - 1)
        fresh = (level[:, :, None] - positions[:, None, :] < sizes.window) & real[:, None, :]
        ring = (level[:, :, None] - held[:, None, :] < sizes.window) & (held >= 0)[:, None, :]
        sink = np.ones((*level.shape, 1), bool)
        feeds["level_mask"] = additive(np.concatenate([sink, ring, fresh], axis=2))
    return feeds, np.nonzero(real.ravel())[0]


def drafter_commit_tables(sizes: EngineSizes, feeds: Feeds, slots: Ints, read: Ints) -> Feeds:
    """Where the drafter's rows of true streams go in its window ring (older rows than the ring holds go to the bin)."""
    width = feeds["positions"].shape[1]
    b = read // width
    position = feeds["positions"].ravel()[read]
    newest = feeds["positions"].max(axis=1)[b]
    ring = 1 + slots[b] * sizes.window + position % sizes.window
    return {"mtp_accepted": read, "mtp_dst": np.where(position > newest - sizes.window, ring, 1)}
