"""Row tables and masks of a pass: where every key, pooled row and committed row lies. Integer arithmetic on a batch.

Conventions (see `contract.py`): pools have row 0 = zero row; window ring row = 1 + slot * W + position % W; entry row =
1 + page * rows + index in page; slot 0 and page 0 are the bin. Compressed rows pooled for a CSA entry: 0 prev A, 1 cur A, 2 cur B,
3 null, 4 + 2 n + half; for HCA: 0 the open window, 1 null, 2 + n.

What depends on a tree and on its place in a window alone (masks among nodes, pooled and folded rows) is made once for every shape and
phase and remembered; a round only adds where its sequences lie.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from trtllm_v4tree.runtime.tree import PAD, Bools, Ints, TreeShape, chain_shape, remembered, tree_shape
from trtllm_v4tree.sizes import EngineSizes

Floats = NDArray[np.float32]
Feeds = dict[str, NDArray[np.int64] | NDArray[np.float32]]
Row = Ints | Sequence[int]
Rows = Ints | Sequence[Sequence[int]]
_HIDDEN = np.float32(-np.inf)
PREV_A, CUR_A, CUR_B, CSA_NULL, CSA_NODES = 0, 1, 2, 3, 4
HCA_OPEN, HCA_NULL, HCA_NODES = 0, 1, 2
BIN_WINDOW_ROW = 1
_EMPTY = np.zeros(0, np.int64)
Scalar = TypeVar("Scalar", np.int64, np.float32)


class Sequences(NamedTuple):
    """Committed state of the sequences of a batch: slots [B], lengths [B] (tokens committed), page table [B, pages]."""

    slots: Row
    lengths: Row
    pages: Ints


class Tree(NamedTuple):
    """A batch of trees of N nodes (the smaller ones padded): the shape of each, and tokens [B][N]."""

    shapes: list[TreeShape]
    tokens: Sequence[Sequence[int]]

    @classmethod
    def make(cls, parents: Rows, tokens: Rows) -> Tree:
        """From parents and tokens [B, N]."""
        return cls([tree_shape(tuple(line)) for line in _listed(parents)], _listed(tokens))

    @property
    def nodes(self) -> int:
        return len(self.shapes[0])

    @property
    def parents(self) -> Ints:
        """[B, N]"""
        return _ints([shape.parents for shape in self.shapes])

    @property
    def reach(self) -> Bools:
        """Ancestor-or-self matrix [B, N, N]."""
        return np.stack([shape.reach for shape in self.shapes])

    @property
    def depth(self) -> Ints:
        """[B, N]"""
        return _ints([shape.depth for shape in self.shapes])


class Boundary(NamedTuple):
    """A node that completes a window: its sequence, its ordinal among the sequence's boundary nodes, node id and depth."""

    row: int
    ordinal: int
    node: int
    depth: int


class WindowEnds(NamedTuple):
    """The M nodes of one tree that complete a window: ids, depths, pooled rows [M, T], and mask [N, M] (who sees their entries)."""

    nodes: tuple[int, ...]
    depths: tuple[int, ...]
    rows: Ints
    mask: Floats


class StepTables(NamedTuple):
    """Feeds of one target step, and what its commit needs again: `ends[kind][b]` are the nodes of b that complete a window (none where
    the native library made the tables: its commit finds them anew)."""

    feeds: Feeds
    seqs: Sequences
    tree: Tree
    positions: Ints
    ends: dict[str, list[WindowEnds]]

    @property
    def boundaries(self) -> dict[str, list[Boundary]]:
        """The nodes that complete a window of each kind, by sequence and node id."""
        return {
            kind: [
                Boundary(b, ordinal, node, depth)
                for b, end in enumerate(ends)
                for ordinal, (node, depth) in enumerate(zip(end.nodes, end.depths, strict=True))
            ]
            for kind, ends in self.ends.items()
        }


class _Kind(NamedTuple):
    """A compressor: its ratio, its rows per page, and of every entry of a sequence the page (by ordinal) and the row in it."""

    name: str
    ratio: int
    page_rows: int
    null: int
    page: Ints
    row: Ints

    @classmethod
    def of(cls, name: str, ratio: int, page_rows: int, pages: int) -> _Kind:
        index = np.arange(pages * page_rows)
        null = CSA_NULL if name == "csa" else HCA_NULL
        return cls(name, ratio, page_rows, null, index // page_rows, 1 + index % page_rows)


@functools.lru_cache(maxsize=8)
def _kinds(sizes: EngineSizes) -> tuple[_Kind, ...]:
    """The compressors of an engine."""
    s = sizes
    csa = (_Kind.of("csa", s.csa_ratio, s.csa_page_rows, s.pages_per_seq),) if s.num_csa else ()
    hca = (_Kind.of("hca", s.hca_ratio, s.hca_page_rows, s.pages_per_seq),) if s.num_hca else ()
    return csa + hca


@functools.lru_cache(maxsize=8)
def _newest_first(window: int) -> Ints:
    """Of slot 0 by length modulo W: a place for the sink, then the rows of the last W - 1 positions, newest first: [W, W]."""
    return 1 + (np.arange(window)[:, None] - np.arange(window)) % window


def window_rows(window: int, slots: Sequence[int], lengths: Sequence[int]) -> Ints:
    """The sink's zero row, then the rows of the last W - 1 committed positions, newest first: [B, 1 + Wn]; row 0 where there is none."""
    width = min(max(lengths), window - 1)
    rows = _newest_first(window).take([length % window for length in lengths], axis=0)
    rows += _ints([[slot * window] for slot in slots])
    rows[:, 0] = 0
    if width < window - 1:
        rows = rows[:, : 1 + width]
    for b, length in enumerate(lengths):
        if length < width:
            rows[b, 1 + length :] = 0
    return rows


@remembered
def window_mask(shape: TreeShape, window: int) -> Floats:
    """What the nodes of a tree see of [sink | W - 1 held window rows, newest first | nodes]: additive [N, W + N]."""
    depth = np.array(shape.depth)
    aged = np.arange(window - 1) >= window - 1 - depth[:, None]
    fresh = shape.reach & (depth[:, None] - depth < window)
    hidden = np.concatenate([np.zeros((len(shape), 1), bool), aged, ~fresh], axis=1)
    return np.where(hidden, _HIDDEN, np.float32(0))


def held_mask(masks: Sequence[Floats], lengths: Sequence[int], window: int) -> Floats:
    """Masks [N, W + x] over [sink | W - 1 held rows | x] as a batch over the rows that are held: [B, N, 1 + Wn + x]."""
    width = min(max(lengths), window - 1)
    mask = np.array(masks)
    if width < window - 1:
        mask = np.concatenate([mask[:, :, : 1 + width], mask[:, :, window:]], axis=2)
    for b, length in enumerate(lengths):
        if length < width:
            mask[b, :, 1 + length : 1 + width] = _HIDDEN
    return mask


def entry_rows(kind: _Kind, pages: Ints, counts: list[int]) -> Ints:
    """Rows of the entry pool of entries 0 .. counts - 1: [B, max count], row 0 where there is none."""
    most = max(counts)
    rows = pages.take(kind.page[:most], axis=1)
    rows *= kind.page_rows
    rows += kind.row[:most]
    for b, count in enumerate(counts):
        if count < most:
            rows[b, count:] = 0
    return rows


def climb(parents: Row, node: int, count: int) -> list[int]:
    """The node and its ancestors, at most `count`, topmost first."""
    path: list[int] = []
    while node >= 0 and len(path) < count:
        path.append(node)
        node = parents[node]
    return path[::-1]


@remembered
def window_ends(shape: TreeShape, kind: str, ratio: int, phase: int) -> WindowEnds:
    """Nodes that complete a window where the root's position is `phase` modulo the ratio."""
    parents, depth = shape.parents, shape.depth
    nodes = [n for n, up in enumerate(parents) if up != PAD and (phase + depth[n] + 1) % ratio == 0]
    csa = kind == "csa"
    pool_row, null = (csa_pool_row, CSA_NULL) if csa else (hca_pool_row, HCA_NULL)
    rows = [pool_row(parents, n, depth[n], phase, ratio) for n in nodes]
    width = max(map(len, rows), default=2 * ratio if csa else 1)
    table = _ints([row + [null] * (width - len(row)) for row in rows]).reshape(len(nodes), width)
    mask = np.where(shape.reach[:, nodes], np.float32(0), _HIDDEN)
    return WindowEnds(tuple(nodes), tuple(depth[n] for n in nodes), table, mask)


def csa_pool_row(parents: tuple[int, ...], node: int, depth: int, phase: int, ratio: int) -> list[int]:
    """Rows pooled into the entry that `node` emits, the root being at `phase`: [2 ratio], A half then B half."""
    window = (phase + depth) // ratio
    row = [CSA_NULL] * (2 * ratio)
    for back, above in enumerate(reversed(climb(parents, node, 2 * ratio))):
        place = 2 * ratio - 1 - back
        row[place] = CSA_NODES + 2 * above + (place >= ratio)
    if (window - 1) * ratio < phase:
        row[0] = PREV_A if window == 0 else CUR_A
    if window * ratio < phase:
        row[ratio] = CUR_B
    return row


def hca_pool_row(parents: tuple[int, ...], node: int, depth: int, phase: int, ratio: int) -> list[int]:
    """Rows pooled into the entry that `node` emits: the open window, then the nodes of its window on the path."""
    start = (phase + depth) // ratio * ratio - phase
    path = climb(parents, node, min(ratio, depth + 1))
    return [HCA_OPEN if start < 0 else HCA_NULL] + [HCA_NODES + n for n in path]


@functools.lru_cache(maxsize=64)
def every_node(batch: int, nodes: int) -> Ints:
    """All node ids of every tree, for `logit_nodes`: [B, N]."""
    return np.tile(np.arange(nodes), (batch, 1))


def step_tables(sizes: EngineSizes, seqs: Sequences, tree: Tree, logit_nodes: Ints) -> StepTables:
    """All inputs of `target_step` but the states."""
    slots, lengths = _row(seqs.slots), _row(seqs.lengths)
    masks = [window_mask(shape, sizes.window) for shape in tree.shapes]
    positions = _ints([[n + d for d in shape.depth] for n, shape in zip(lengths, tree.shapes, strict=True)])
    feeds: Feeds = {
        "token_ids": _ints(tree.tokens),
        "positions": positions,
        "logit_nodes": logit_nodes,
        "slots": _ints(slots),
        "window_rows": window_rows(sizes.window, slots, lengths),
        "node_mask": held_mask(masks, lengths, sizes.window),
    }
    ends = {}
    for kind in _kinds(sizes):
        found = ends[kind.name] = _find_ends(kind, lengths, tree)
        feeds.update(_entry_feeds(kind, seqs.pages, lengths, found))
    return StepTables(feeds, seqs, tree, positions, ends)


def _find_ends(kind: _Kind, lengths: Sequence[int], tree: Tree) -> list[WindowEnds]:
    """Phases from which a tree completes no window all count as the first, so that they are remembered as one."""
    ends, name, ratio = [], kind.name, kind.ratio
    for length, shape in zip(lengths, tree.shapes, strict=True):
        phase = length % ratio
        ends.append(window_ends(shape, name, ratio, phase if phase + shape.height >= ratio else 0))
    return ends


def _entry_feeds(kind: _Kind, pages: Ints, lengths: Sequence[int], ends: list[WindowEnds]) -> Feeds:
    """Rows [B, E] of the committed entries; pool table, positions and mask of the branch entries."""
    counts = [length // kind.ratio for length in lengths]
    if any(own.nodes for own in ends):
        table, positions, branch = _branch_tables(kind, lengths, ends)
    else:
        table, positions, branch = _no_branches(len(ends), len(ends[0].mask), ends[0].rows.shape[1])
    return {
        f"{kind.name}_rows": entry_rows(kind, pages, counts),
        f"{kind.name}_pool_table": table,
        f"{kind.name}_entry_positions": positions,
        f"{kind.name}_mask": entry_mask(counts, branch),
    }


def _branch_tables(kind: _Kind, lengths: Sequence[int], ends: list[WindowEnds]) -> tuple[Ints, Ints, Floats]:
    """Of the entries that nodes would emit: pool table [B, M, T], first position of each window [B, M], who sees them [B, N, M]."""
    most = max(len(own.nodes) for own in ends)
    positions = [
        [length + depth + 1 - kind.ratio for depth in own.depths] + [0] * (most - len(own.depths))
        for length, own in zip(lengths, ends, strict=True)
    ]
    table = _stacked([own.rows for own in ends], kind.null)
    return table, _ints(positions), _stacked([own.mask for own in ends], _HIDDEN)


@functools.lru_cache(maxsize=64)
def _no_branches(batch: int, nodes: int, width: int) -> tuple[Ints, Ints, Floats]:
    """The same where no node completes a window, as in most rounds."""
    table, positions = np.zeros((batch, 0, width), np.int64), np.zeros((batch, 0), np.int64)
    return table, positions, np.zeros((batch, nodes, 0), np.float32)


def entry_mask(counts: list[int], branch: Floats) -> Floats:
    """What nodes see of [committed entries | branch entries]: [B, N, E + M], from what they see of the latter [B, N, M]."""
    batch, nodes, most = branch.shape
    entries = max(counts)
    mask = np.zeros((batch, nodes, entries + most), np.float32)
    if most:
        mask[:, :, entries:] = branch
    for b, count in enumerate(counts):
        if count < entries:
            mask[b, :, count:entries] = _HIDDEN
    return mask


def _stacked(tables: Sequence[NDArray[Scalar]], fill: Scalar | int) -> NDArray[Scalar]:
    """Tables of one sequence each as a batch, the smaller ones padded: [B, rows, columns]."""
    shapes = {table.shape for table in tables}
    if len(shapes) == 1:
        return np.array(tables)
    rows, columns = zip(*shapes, strict=True)
    out = np.full((len(tables), max(rows), max(columns)), fill, tables[0].dtype)
    for b, table in enumerate(tables):
        out[b, : table.shape[0], : table.shape[1]] = table
    return out


def commit_tables(sizes: EngineSizes, step: StepTables, path: Rows, counts: Row) -> Feeds:
    """Inputs of `commit` for accepted node ids `path` [B, T] of which the first `counts` [B] are kept (law 2)."""
    n, w, lengths = step.tree.nodes, sizes.window, _row(step.seqs.lengths)
    paths = [tuple(line[:k]) for line, k in zip(_listed(path), _row(counts), strict=True)]
    accepted: list[int] = []
    ring: list[int] = []
    streams: list[int] = []
    for b, (line, slot, length) in enumerate(zip(paths, _row(step.seqs.slots), lengths, strict=True)):
        accepted += [b * n + node for node in line]
        ring += ring_rows(w, slot, length, length + len(line))
        streams += stream_rows(sizes.max_commit, slot, length, length + len(line))
    feeds: Feeds = {"slots": step.feeds["slots"], "accepted": _ints(accepted), "window_dst": _ints(ring)}
    if sizes.has_mtp:
        feeds["stream_dst"] = _ints(streams)
    longest = max(map(len, paths))
    for kind in _kinds(sizes):
        ratio, width = kind.ratio, 1 + min(longest, kind.ratio)
        folds = [fold_rows(p, kind.name, ratio, at % ratio, width) for p, at in zip(paths, lengths, strict=True)]
        feeds[f"{kind.name}_fold_table"] = _ints(folds)
        feeds.update(_emitted(kind, step, paths, lengths))
    return feeds


def ring_rows(window: int, slot: int, start: int, end: int) -> list[int]:
    """Ring rows of positions start .. end - 1; the bin for those that the same commit overwrites."""
    base, kept = 1 + slot * window, max(start, end - window)
    return [BIN_WINDOW_ROW] * (kept - start) + [base + p % window for p in range(kept, end)]


def stream_rows(max_commit: int, slot: int, start: int, end: int) -> list[int]:
    """Rows of the streams pool of positions start .. end - 1: a ring of the newest `max_commit`, read by the drafter or not."""
    base = 1 + slot * max_commit
    return [base + p % max_commit for p in range(start, end)]


def _emitted(kind: _Kind, step: StepTables, paths: list[tuple[int, ...]], lengths: Sequence[int]) -> Feeds:
    """Accepted boundary nodes and the entry rows they go to."""
    ends, pages, ratio = step.ends[kind.name], step.seqs.pages, kind.ratio
    most = max(len(own.nodes) for own in ends)
    source, target = [], []
    for b, (own, path, length) in enumerate(zip(ends, paths, lengths, strict=True)):
        for depth in range(ratio - 1 - length % ratio, len(path), ratio):
            assert path[depth] in own.nodes, (
                f"node {path[depth]} is not at depth {depth}: what is committed is no path of the tree"
            )
            page, row = divmod((length + depth) // ratio, kind.page_rows)
            source.append(b * most + own.nodes.index(path[depth]))
            target.append(1 + int(pages[b, page]) * kind.page_rows + row)
    return {f"{kind.name}_emitted": _ints(source), f"{kind.name}_dst": _ints(target)}


@remembered
def fold_rows(path: tuple[int, ...], kind: str, ratio: int, phase: int, width: int) -> Ints:
    """Rows folded into each state of a sequence after the nodes of `path` are committed; its first position is at `phase`: [states, width]."""
    csa = kind == "csa"
    rows = csa_fold_rows(path, ratio, phase) if csa else hca_fold_rows(path, ratio, phase)
    return _ints([row + [CSA_NULL if csa else HCA_NULL] * (width - len(row)) for row in rows])


def csa_fold_rows(path: tuple[int, ...], ratio: int, phase: int) -> list[list[int]]:
    """Rows folded into the new prev A, cur A and cur B."""
    new = (phase + len(path)) // ratio
    rows = []
    for window, half in ((new - 1, 0), (new, 0), (new, 1)):
        first = window * ratio - phase
        row = [CSA_NODES + 2 * node + half for node in path[max(0, first) : max(0, first + ratio)]]
        if window == 0:
            row.insert(0, CUR_B if half else CUR_A)
        elif window == -1:
            row.insert(0, PREV_A)
        rows.append(row or [CSA_NULL])
    return rows


def hca_fold_rows(path: tuple[int, ...], ratio: int, phase: int) -> list[list[int]]:
    """Rows folded into the new open window."""
    first = (phase + len(path)) // ratio * ratio - phase
    row = [HCA_NODES + node for node in path[max(0, first) :]]
    return [[HCA_OPEN if first <= 0 else HCA_NULL, *row]]


def draft_tables(
    sizes: EngineSizes, seqs: Sequences, pending: Row, next_tokens: Rows, steps: int
) -> tuple[Feeds, Feeds]:
    """Inputs of `draft_round` but the states, and what the drafter's rows add to the inputs of the next commit.

    pending [B]: accepted rows the drafter has not read, the newest at position lengths - 1; next_tokens [B, S]: the token after each,
    left aligned.
    """
    slots, unread, w = _row(seqs.slots), _row(pending), sizes.window
    start = [length - count for length, count in zip(_row(seqs.lengths), unread, strict=True)]
    width = max(unread)
    streams = [stream_rows(sizes.max_commit, s, n, n + k) for s, n, k in zip(slots, start, unread, strict=True)]
    masks = [window_mask(chain_shape(width), w)] * len(slots)
    feeds: Feeds = {
        "stream_rows": _ints([[*rows, *[0] * (width - len(rows))] for rows in streams]),
        "next_tokens": _ints(
            [[*line[:k], *[0] * (width - k)] for line, k in zip(_listed(next_tokens), unread, strict=True)]
        ),
        "positions": _ints([[*range(n, n + k), *[n] * (width - k)] for n, k in zip(start, unread, strict=True)]),
        "mtp_window_rows": window_rows(w, slots, start),
        "catchup_mask": held_mask(masks, start, w),
    }
    if steps:
        feeds["last_row"] = _ints([[count - 1] for count in unread])
        feeds["root_position"] = _ints([[length] for length in _row(seqs.lengths)])
    if steps > 1:
        feeds["level_mask"] = held_mask([level_mask(count, width, steps - 1, w) for count in unread], start, w)
    return feeds, _drafter_commit(w, slots, start, unread, width)


@functools.lru_cache(maxsize=256)
def level_mask(pending: int, width: int, levels: int, window: int) -> Floats:
    """What the drafter's rows of level 2, 3, ... see of [sink | W - 1 held window rows | S accepted rows]: [levels, W + S].

    They are the rows of a chain that goes on behind the `pending` accepted ones, but for what they see of themselves.
    """
    further = window_mask(chain_shape(pending + levels), window)[pending:]
    mask = np.full((levels, window + width), _HIDDEN)
    mask[:, : window + pending] = further[:, : window + pending]
    return mask


def _drafter_commit(window: int, slots: Sequence[int], start: list[int], unread: Sequence[int], width: int) -> Feeds:
    """Where the drafter's rows of true streams go in its window ring."""
    read: list[int] = []
    ring: list[int] = []
    for b, (slot, first, count) in enumerate(zip(slots, start, unread, strict=True)):
        read += range(b * width, b * width + count)
        ring += ring_rows(window, slot, first, first + count)
    return {"mtp_accepted": _ints(read), "mtp_dst": _ints(ring)}


def _row(values: Row) -> Sequence[int]:
    return values.tolist() if isinstance(values, np.ndarray) else values


def _listed(values: Rows) -> Sequence[Sequence[int]]:
    return values.tolist() if isinstance(values, np.ndarray) else values


def _ints(values: Sequence[Any]) -> Ints:
    return np.array(values, np.int64) if values else _EMPTY
