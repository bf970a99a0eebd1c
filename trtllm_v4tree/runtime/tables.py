"""Row tables and masks of a pass: where every key, pooled row and committed row lies. Integer arithmetic on a batch.

Conventions (see `contract.py`): pools have row 0 = zero row; window ring row = 1 + slot * W + position % W; entry row =
1 + page * rows + index in page; slot 0 and page 0 are the bin. Compressed rows pooled for a CSA entry: 0 prev A, 1 cur A, 2 cur B,
3 null, 4 + 2 n + half; for HCA: 0 the open window, 1 null, 2 + n.

Masks and wide tables are NumPy; tables with a handful of entries per sequence are plain lists, which is faster at these sizes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trtllm_v4tree.runtime.tree import PAD, Bools, Ints, ancestors
from trtllm_v4tree.sizes import EngineSizes

Floats = NDArray[np.float32]
Feeds = dict[str, NDArray[np.int64] | NDArray[np.float32]]
_HIDDEN = np.float32(-np.inf)
PREV_A, CUR_A, CUR_B, CSA_NULL, CSA_NODES = 0, 1, 2, 3, 4
HCA_OPEN, HCA_NULL, HCA_NODES = 0, 1, 2
BIN_WINDOW_ROW = 1


class Sequences(NamedTuple):
    """Committed state of the sequences of a batch: slots [B], lengths [B] (tokens committed), page table [B, pages]."""

    slots: Ints
    lengths: Ints
    pages: Ints


@dataclass(frozen=True)
class Tree:
    """A batch of trees: parents, tokens and depth [B, N], ancestor-or-self matrix [B, N, N]."""

    parents: Ints
    tokens: Ints
    reach: Bools
    depth: Ints

    @classmethod
    def make(cls, parents: Ints, tokens: Ints) -> Tree:
        if parents.shape[1] == 1:
            return cls(parents, tokens, (parents != PAD)[:, :, None], np.zeros_like(parents))
        reach = ancestors(parents)
        return cls(parents, tokens, reach, np.maximum(np.count_nonzero(reach, axis=2) - 1, 0))


class Boundary(NamedTuple):
    """A node that completes a window: its sequence, its ordinal among the sequence's boundary nodes, node id and depth."""

    row: int
    ordinal: int
    node: int
    depth: int


@dataclass(frozen=True)
class StepTables:
    """Feeds of one target step, and what its commit needs again."""

    feeds: Feeds
    seqs: Sequences
    tree: Tree
    positions: Ints
    boundaries: dict[str, list[Boundary]]


class _Kind(NamedTuple):
    name: str
    ratio: int
    page_rows: int


class _Static(NamedTuple):
    """Constants of an engine's sizes."""

    kinds: tuple[_Kind, ...]
    newest_first: Ints
    aged_out: Floats


@functools.lru_cache(maxsize=8)
def _static(sizes: EngineSizes) -> _Static:
    """newest_first: ring indices W - 1 .. 0 twice; aged_out[t, j]: -inf where a row at depth t no longer sees held row j."""
    w = sizes.window
    kinds = (
        _Kind("csa", sizes.csa_ratio, sizes.csa_page_rows) if sizes.num_csa else None,
        _Kind("hca", sizes.hca_ratio, sizes.hca_page_rows) if sizes.num_hca else None,
    )
    depth = np.arange(sizes.max_commit + 64)[:, None]
    aged = np.where(np.arange(w - 1) >= w - 1 - depth, _HIDDEN, np.float32(0))
    ring = np.arange(w - 1, -1, -1)
    return _Static(tuple(k for k in kinds if k), np.concatenate([ring, ring]), aged)


def window_rows(sizes: EngineSizes, slots: Ints, lengths: Ints) -> Ints:
    """The sink's zero row, then the rows of the last W - 1 committed positions, newest first: [B, 1 + Wn]; row 0 where there is none."""
    w, ring = sizes.window, _static(sizes).newest_first
    held = np.minimum(lengths, w - 1).tolist()
    width = max(held)
    rows = np.zeros((len(held), 1 + width), np.int64)
    for b, (slot, length) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
        start = w - 1 - (length - 1) % w
        rows[b, 1 : 1 + held[b]] = ring[start : start + held[b]] + (1 + slot * w)
    return rows


def node_mask(sizes: EngineSizes, lengths: Ints, depth: Ints, reach: Bools) -> Floats:
    """What nodes at `depth` [B, N] see of [sink | held window rows | nodes]: additive [B, N, 1 + Wn + N]."""
    w = sizes.window
    width = int(min(lengths.max(), w - 1))
    batch, n = depth.shape
    mask = np.zeros((batch, n, 1 + width + n), np.float32)
    deepest = int(depth.max())
    if width > w - 1 - deepest:
        mask[:, :, 1 : 1 + width] = _static(sizes).aged_out[depth, :width]
    for b, length in enumerate(lengths.tolist()):
        if length < width:
            mask[b, :, 1 + length : 1 + width] = _HIDDEN
    if n > 1:
        seen = reach if deepest < w else reach & (depth[:, :, None] - depth[:, None, :] < w)
        mask[:, :, 1 + width :] = np.where(seen, np.float32(0), _HIDDEN)
    return mask


def entry_rows(pages: Ints, counts: Ints, page_rows: int) -> Ints:
    """Rows of the entry pool of entries 0 .. counts - 1: [B, max count], row 0 where there is none."""
    index = np.arange(int(counts.max()))
    rows = 1 + pages[:, index // page_rows] * page_rows + index % page_rows
    if len(counts) > 1:
        rows[index >= counts[:, None]] = 0
    return rows


def find_boundaries(tree: Tree, positions: Ints, ratio: int) -> list[Boundary]:
    """Nodes that complete a window of `ratio` tokens, by sequence and node id."""
    ends = (positions + 1) % ratio == 0
    found, row, index = [], -1, 0
    for b, n in np.argwhere(ends).tolist():
        if tree.parents[b, n] == PAD:
            continue
        row, index = b, index + 1 if b == row else 0
        found.append(Boundary(b, index, n, int(tree.depth[b, n])))
    return found


def climb(parents: list[int], node: int, count: int) -> list[int]:
    """The node and its ancestors, at most `count`, topmost first."""
    path: list[int] = []
    while node >= 0 and len(path) < count:
        path.append(node)
        node = parents[node]
    return path[::-1]


def csa_pool_row(length: int, at: Boundary, parents: list[int], ratio: int) -> list[int]:
    """Rows pooled into the entry that `at` emits after `length` committed tokens: [2 ratio], A half then B half."""
    position = length + at.depth
    window = position // ratio
    path = climb(parents, at.node, 2 * ratio)
    row = [CSA_NULL] * (2 * ratio)
    for back, node in enumerate(reversed(path)):
        slot = 2 * ratio - 1 - back
        row[slot] = CSA_NODES + 2 * node + (slot >= ratio)
    if (window - 1) * ratio < length:
        row[0] = PREV_A if window == length // ratio else CUR_A
    if window * ratio < length:
        row[ratio] = CUR_B
    return row


def hca_pool_row(length: int, at: Boundary, parents: list[int], ratio: int) -> list[int]:
    """Rows pooled into the entry that `at` emits: the open window, then the nodes of its window on the path."""
    start = (length + at.depth) // ratio * ratio - length
    path = climb(parents, at.node, min(ratio, at.depth + 1))
    return [HCA_OPEN if start < 0 else HCA_NULL] + [HCA_NODES + n for n in path]


def padded(rows: list[list[int]], fill: int) -> list[list[int]]:
    """Rows of equal length."""
    width = max(map(len, rows))
    return [row + [fill] * (width - len(row)) for row in rows]


def step_tables(sizes: EngineSizes, seqs: Sequences, tree: Tree, logit_nodes: Ints) -> StepTables:
    """All inputs of `target_step` but the states."""
    positions = seqs.lengths[:, None] + tree.depth
    feeds: Feeds = {
        "token_ids": tree.tokens,
        "positions": positions,
        "logit_nodes": logit_nodes,
        "slots": seqs.slots,
        "window_rows": window_rows(sizes, seqs.slots, seqs.lengths),
        "node_mask": node_mask(sizes, seqs.lengths, tree.depth, tree.reach),
    }
    boundaries = {}
    for kind in _static(sizes).kinds:
        found = boundaries[kind.name] = find_boundaries(tree, positions, kind.ratio)
        feeds.update(_entry_feeds(kind, seqs, tree, found))
    return StepTables(feeds, seqs, tree, positions, boundaries)


def _entry_feeds(kind: _Kind, seqs: Sequences, tree: Tree, found: list[Boundary]) -> Feeds:
    counts = seqs.lengths // kind.ratio
    rows = entry_rows(seqs.pages, counts, kind.page_rows)
    batch, n = tree.parents.shape
    most = 1 + max((at.ordinal for at in found), default=-1)
    entries = rows.shape[1]
    mask = np.zeros((batch, n, entries + most), np.float32)
    if batch > 1:
        mask[:, :, :entries][np.broadcast_to((np.arange(entries) >= counts[:, None])[:, None], (batch, n, entries))] = (
            _HIDDEN
        )
    mask[:, :, entries:] = _HIDDEN
    for at in found:
        mask[at.row, tree.reach[at.row, :, at.node], entries + at.ordinal] = 0
    table, positions = _pool_table(kind, seqs, tree, found, most)
    return {
        f"{kind.name}_rows": rows,
        f"{kind.name}_pool_table": table,
        f"{kind.name}_entry_positions": positions,
        f"{kind.name}_mask": mask,
    }


def _pool_table(kind: _Kind, seqs: Sequences, tree: Tree, found: list[Boundary], most: int) -> tuple[Ints, Ints]:
    """Pool table [B, M, T] and first position of each window [B, M]."""
    csa = kind.name == "csa"
    null, batch = (CSA_NULL if csa else HCA_NULL), len(seqs.slots)
    if not found:
        return np.zeros((batch, 0, 2 * kind.ratio if csa else 1), np.int64), np.zeros((batch, 0), np.int64)
    lengths = seqs.lengths.tolist()
    parents = {at.row: tree.parents[at.row].tolist() for at in found}
    pool_row = csa_pool_row if csa else hca_pool_row
    rows = padded([pool_row(lengths[at.row], at, parents[at.row], kind.ratio) for at in found], null)
    table = np.full((batch, most, len(rows[0])), null, np.int64)
    positions = np.zeros((batch, most), np.int64)
    for at, row in zip(found, rows, strict=True):
        table[at.row, at.ordinal] = row
        positions[at.row, at.ordinal] = (lengths[at.row] + at.depth) // kind.ratio * kind.ratio
    return table, positions


def commit_tables(sizes: EngineSizes, step: StepTables, path: Ints, counts: Ints, unread: Ints | None = None) -> Feeds:
    """Inputs of `commit` for accepted node ids `path` [B, T] of which the first `counts` [B] are kept (law 2).

    unread [B]: rows of the streams pool that the drafter has yet to read; new ones go behind them.
    """
    seqs, n, w = step.seqs, step.tree.parents.shape[1], sizes.window
    slots, lengths, kept = seqs.slots.tolist(), seqs.lengths.tolist(), counts.tolist()
    paths = [line[:k] for line, k in zip(path.tolist(), kept, strict=True)]
    behind = [0] * len(slots) if unread is None else unread.tolist()
    accepted: list[int] = []
    ring: list[int] = []
    streams: list[int] = []
    for b, line in enumerate(paths):
        base, length, k = 1 + slots[b] * w, lengths[b], kept[b]
        accepted += [b * n + node for node in line]
        ring += [BIN_WINDOW_ROW] * (k - w)
        ring += [base + p % w for p in range(length + max(0, k - w), length + k)]
        first = 1 + slots[b] * sizes.max_commit + behind[b]
        streams += range(first, first + k)
    feeds: Feeds = {"slots": seqs.slots, "accepted": _ints(accepted), "window_dst": _ints(ring)}
    if sizes.has_mtp:
        feeds["stream_dst"] = _ints(streams)
    for kind in _static(sizes).kinds:
        fold = csa_fold_rows if kind.name == "csa" else hca_fold_rows
        null = CSA_NULL if kind.name == "csa" else HCA_NULL
        rows = [row for line, length in zip(paths, lengths, strict=True) for row in fold(length, line, kind.ratio)]
        feeds[f"{kind.name}_fold_table"] = _ints(padded(rows, null)).reshape(len(paths), len(rows) // len(paths), -1)
        feeds.update(_emitted(kind, step, paths))
    return feeds


def _ints(values: list[int] | list[list[int]]) -> Ints:
    return np.array(values, np.int64)


def _emitted(kind: _Kind, step: StepTables, paths: list[list[int]]) -> Feeds:
    """Accepted boundary nodes and the entry rows they go to."""
    found = step.boundaries[kind.name]
    most = 1 + max((at.ordinal for at in found), default=-1)
    source, target = [], []
    for at in found:
        line = paths[at.row]
        if at.depth < len(line) and line[at.depth] == at.node:
            entry = int(step.seqs.lengths[at.row] + at.depth) // kind.ratio
            page = int(step.seqs.pages[at.row, entry // kind.page_rows])
            source.append(at.row * most + at.ordinal)
            target.append(1 + page * kind.page_rows + entry % kind.page_rows)
    return {f"{kind.name}_emitted": _ints(source), f"{kind.name}_dst": _ints(target)}


def csa_fold_rows(length: int, path: list[int], ratio: int) -> list[list[int]]:
    """Rows folded into the new prev A, cur A and cur B after the nodes of `path` are committed."""
    old, new = length // ratio, (length + len(path)) // ratio
    rows = []
    for window, half in ((new - 1, 0), (new, 0), (new, 1)):
        first = window * ratio - length
        nodes = path[max(0, first) : max(0, first + ratio)]
        row = [CSA_NODES + 2 * node + half for node in nodes]
        if window == old:
            row.insert(0, CUR_B if half else CUR_A)
        elif window == old - 1:
            row.insert(0, PREV_A)
        rows.append(row or [CSA_NULL])
    return rows


def hca_fold_rows(length: int, path: list[int], ratio: int) -> list[list[int]]:
    """Rows folded into the new open window."""
    window = (length + len(path)) // ratio
    first = window * ratio - length
    row = [HCA_NODES + node for node in path[max(0, first) :]]
    return [[HCA_OPEN if first <= 0 else HCA_NULL, *row]]


def draft_tables(
    sizes: EngineSizes, seqs: Sequences, pending: Ints, next_tokens: Ints, steps: int
) -> tuple[Feeds, Ints]:
    """Inputs of `draft_round` but the states, and `read`: flat indices of the real catch-up rows.

    pending [B]: accepted rows the drafter has not read, the newest at position lengths - 1; next_tokens [B, S] left aligned.
    """
    batch, width = next_tokens.shape
    index = np.arange(width)
    start = seqs.lengths - pending
    real = index < pending[:, None]
    depth = np.where(real, index, 0)
    reach = np.broadcast_to(np.tri(width, dtype=bool), (batch, width, width))
    feeds: Feeds = {
        "stream_rows": np.where(real, (1 + seqs.slots * sizes.max_commit)[:, None] + index, 0),
        "next_tokens": np.where(real, next_tokens, 0),
        "positions": start[:, None] + depth,
        "mtp_window_rows": window_rows(sizes, seqs.slots, start),
        "catchup_mask": node_mask(sizes, start, np.broadcast_to(index, (batch, width)), reach),
    }
    if steps:
        feeds["last_row"] = (pending - 1)[:, None]
        feeds["root_position"] = seqs.lengths[:, None]
    if steps > 1:
        feeds["level_mask"] = _level_mask(sizes, start, pending, width, steps - 1)
    return feeds, np.flatnonzero(real)


def _level_mask(sizes: EngineSizes, start: Ints, pending: Ints, width: int, levels: int) -> Floats:
    """What the rows of each further level see of [sink | held window rows | accepted rows]: [B, levels, 1 + Wn + S]."""
    depth = pending[:, None] + np.arange(levels)
    batch = len(pending)
    nothing = np.zeros((batch, levels, levels), bool)
    held = node_mask(sizes, start, depth, nothing)[:, :, :-levels]
    age = depth[:, :, None] - np.arange(width)
    fresh = (age < sizes.window) & (np.arange(width) < pending[:, None])[:, None, :]
    return np.concatenate([held, np.where(fresh, np.float32(0), _HIDDEN)], axis=2)


def drafter_commit_tables(sizes: EngineSizes, feeds: Feeds, slots: Ints, read: Ints) -> Feeds:
    """Where the drafter's rows of true streams go in its window ring (older rows than the ring holds go to the bin)."""
    positions = feeds["positions"]
    width = positions.shape[1]
    b, position = read // width, positions.ravel()[read]
    ring = 1 + slots[b] * sizes.window + position % sizes.window
    if width > sizes.window:
        ring[position <= positions.max(axis=1)[b] - sizes.window] = BIN_WINDOW_ROW
    return {"mtp_accepted": read, "mtp_dst": ring}
