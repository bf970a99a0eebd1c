"""Trees and row tables against loops over positions, written from spec section 2.3 and the terms of `contract.py`."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_v4tree.config import ModelConfig
from trtllm_v4tree.errors import RequestError
from trtllm_v4tree.runtime import tables
from trtllm_v4tree.runtime.tree import PAD, Ints, parse_speculation, select_nodes
from trtllm_v4tree.sizes import EngineSizes

from .oracle.tiny import CONFIGS
from .oracle.trees import path as path_of

CONFIG = ModelConfig.from_dict(CONFIGS["w16"])
SIZES = EngineSizes.make(CONFIG, max_batch_size=4, max_seq_len=640, max_verify_tokens=16, prefill_chunk=64)
Row = tuple[str, str, int]
"""A raw compressor row: half A or B, committed or node, and its position or node id."""


def chain(batch: int, length: int) -> Ints:
    """Parents of a chain: [B, length]."""
    return np.broadcast_to(np.arange(-1, length - 1), (batch, length))


@st.composite
def parent_lists(draw: st.DrawFn, most: int = 10) -> list[int]:
    """Parents of one tree in topological order."""
    size = draw(st.integers(1, most))
    return [-1] + [draw(st.integers(0, n - 1)) for n in range(1, size)]


@st.composite
def batches(draw: st.DrawFn, empty: bool = True) -> tuple[np.ndarray, list[list[int]]]:
    """1 to 4 trees padded to one width, and the lists that they came from."""
    own = draw(st.lists(parent_lists(), min_size=1, max_size=4))
    if empty and draw(st.booleans()):
        own.append([])
    width = max(map(len, own))
    return np.array([p + [PAD] * (width - len(p)) for p in own], np.int64), own


@st.composite
def steps(draw: st.DrawFn) -> tuple[tables.StepTables, list[list[int]]]:
    """Step tables of a batch with random lengths, slots and pages; now and then one long chain, as in a prefill."""
    parents, own = draw(batches(empty=False))
    if draw(st.integers(0, 4)) == 0:
        count = draw(st.integers(2, 64))
        own = [list(range(-1, count - 1))] * len(own)
        parents = np.array(chain(len(own), count))
    lengths = draw(st.lists(st.integers(0, SIZES.max_seq_len - 64), min_size=len(own), max_size=len(own)))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    slots = 1 + rng.permutation(SIZES.max_batch_size)[: len(own)]
    pages = 1 + rng.permutation(SIZES.num_pages - 1)[: len(own) * SIZES.pages_per_seq].reshape(len(own), -1)
    tree = tables.Tree.make(parents, rng.integers(0, CONFIG.vocab_size, parents.shape))
    seqs = tables.Sequences(slots, np.array(lengths), pages)
    nodes = np.broadcast_to(np.arange(parents.shape[1]), parents.shape)
    return tables.step_tables(SIZES, seqs, tree, nodes), own


# Trees.


@given(batches())
def test_ancestors_and_depths_equal_a_walk_up(batch: tuple[np.ndarray, list[list[int]]]) -> None:
    parents, own = batch
    tree_batch = tables.Tree.make(parents, np.zeros_like(parents))
    reach, depth = tree_batch.reach, tree_batch.depth
    np.testing.assert_array_equal(tree_batch.parents, parents)
    for b, tree in enumerate(own):
        for n in range(parents.shape[1]):
            up = path_of(tree, n) if n < len(tree) else []
            assert np.flatnonzero(reach[b, n]).tolist() == sorted(up)
            assert depth[b, n] == max(len(up) - 1, 0)
            assert tree_batch.shapes[b].height >= len(up)
            if up:
                assert tables.climb(tree, n, 3) == up[-3:]


@pytest.mark.parametrize("length", [1, 2, 16, 64])
def test_a_chain_reaches_all_earlier_nodes(length: int) -> None:
    parents = chain(3, length)
    assert parents.shape == (3, length) and parents.tolist() == [list(range(-1, length - 1))] * 3
    tree = tables.Tree.make(parents, parents)
    assert (tree.reach == np.tri(length, dtype=bool)).all() and (tree.depth == np.arange(length)).all()


@st.composite
def candidates(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scores, parents and tokens [B, C] by level; increments of few values, 0 among them, so that ties are common."""
    batch, topk, levels = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    scores, parents = [], []
    for _ in range(batch):
        score: list[float] = (-0.5 * rng.integers(0, 3, topk)).tolist()
        parent, first = [-1] * topk, 0
        for _ in range(1, levels):
            level = range(first, len(score))
            frontier = sorted(level, key=lambda i: (-score[i], i))[:topk]
            first = len(score)
            for f in frontier:
                score += [score[f] - 0.5 * int(x) for x in rng.integers(0, 3, topk)]
                parent += [f] * topk
        scores.append(score)
        parents.append(parent)
    shape = np.array(parents).shape
    return np.array(scores, np.float32), np.array(parents, np.int64), rng.integers(4, 99, shape)


@settings(max_examples=200)
@given(candidates(), st.data())
def test_select_nodes_keeps_the_best_under_a_strict_total_order(
    drawn: tuple[np.ndarray, np.ndarray, np.ndarray], data: st.DataObject
) -> None:
    scores, parents, tokens = drawn
    batch, count = scores.shape
    budgets = np.array(data.draw(st.lists(st.integers(1, count + 1), min_size=batch, max_size=batch)))
    roots = list(range(1, batch + 1))
    chosen, tree, drafted = map(np.array, select_nodes(scores, parents, tokens, budgets, roots))
    assert tree.shape == drafted.shape == chosen.shape
    for b in range(batch):
        level = [_level(parents[b], c) for c in range(count)]
        order = sorted(range(count), key=lambda c: (-scores[b, c], level[c], c))
        kept = sorted(order[: budgets[b] - 1])
        assert all(parents[b, c] in (-1, *kept) for c in kept), "an ancestor is missing"
        real = tree[b] != PAD
        assert real.sum() == budgets[b] == len(kept) + 1 and real[: budgets[b]].all()
        assert chosen[b].tolist() == [-1, *kept] + [PAD] * (~real).sum()
        place = {-1: 0} | {c: i + 1 for i, c in enumerate(kept)}
        assert tree[b, real].tolist() == [-1] + [place[parents[b, c]] for c in kept]
        assert drafted[b, real].tolist() == [roots[b], *tokens[b, kept].tolist()]
        assert (tree[b, 1 : budgets[b]] < np.arange(1, budgets[b])).all(), "a parent follows its child"


def _level(parents: np.ndarray, candidate: int) -> int:
    return len(path_of(parents, candidate))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("s3", "is unknown"),
        ("s3_k2_d6 ", "is unknown"),
        ("s0_k1_d2", "drafts nothing"),
        ("s1_k0_d2", "drafts nothing"),
        ("s1_k1_d1", "drafts nothing"),
        ("s3_k2_d12", "drafts only 10: use d11 or less"),
    ],
)
def test_speculations_that_cannot_be_are_refused(name: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        parse_speculation(name)


@pytest.mark.parametrize("name", ["s1_k1_d2", "s7_k1_d8", "s3_k2_d11"])
def test_speculation_names_round_trip(name: str) -> None:
    speculation = parse_speculation(name)
    assert speculation is not None and speculation.name == name
    assert parse_speculation("none") is None


# Pools and folds: which raw rows of which positions make an entry or a state.


def _expand(codes: list[int], length: int, ratio: int) -> Counter[Row]:
    """Raw rows behind the codes of a pool or fold table, by the conventions of `contract.py`."""
    start = length // ratio * ratio
    open_window, before = range(start, length), range(max(start - ratio, 0), start)
    if ratio == SIZES.csa_ratio:
        states = [[("A", p) for p in before], [("A", p) for p in open_window], [("B", p) for p in open_window], []]
    else:
        states = [[("B", p) for p in open_window], []]
    out: Counter[Row] = Counter()
    for code in codes:
        if code < len(states):
            out.update((half, "committed", p) for half, p in states[code])
        elif ratio == SIZES.csa_ratio:
            out[("AB"[(code - 4) % 2], "node", (code - 4) // 2)] += 1
        else:
            out["B", "node", code - 2] += 1
    return out


def _rows(half: str, positions: range, length: int, path: list[int]) -> Counter[Row]:
    """The raw rows of positions: committed below `length`, on the path from there to its end."""
    inside = [p for p in positions if 0 <= p < length + len(path)]
    return Counter((half, "committed", p) if p < length else (half, "node", path[p - length]) for p in inside)


def _entry(window: int, ratio: int, length: int, path: list[int]) -> Counter[Row]:
    """Spec 2.3: the B rows of the window, and for CSA the A rows of the window before."""
    own = _rows("B", range(window * ratio, (window + 1) * ratio), length, path)
    if ratio != SIZES.csa_ratio:
        return own
    return own + _rows("A", range((window - 1) * ratio, window * ratio), length, path)


def _boundaries(step: tables.StepTables, kind: str, b: int) -> list[int]:
    """Boundary nodes of a sequence, by their index."""
    found = [at for at in step.boundaries[kind] if at.row == b]
    assert [at.ordinal for at in found] == list(range(len(found)))
    return [at.node for at in found]


KINDS = (("csa", SIZES.csa_ratio), ("hca", SIZES.hca_ratio))


@settings(max_examples=150, deadline=None)
@given(steps())
def test_pool_tables_hold_the_rows_of_every_entry(drawn: tuple[tables.StepTables, list[list[int]]]) -> None:
    step, own = drawn
    for kind, ratio in KINDS:
        for b, tree in enumerate(own):
            length = int(step.seqs.lengths[b])
            ends = [n for n in range(len(tree)) if (length + len(path_of(tree, n))) % ratio == 0]
            assert _boundaries(step, kind, b) == ends
            for m, n in enumerate(ends):
                path = path_of(tree, n)
                window = (length + len(path) - 1) // ratio
                codes = step.feeds[f"{kind}_pool_table"][b, m].tolist()
                assert _expand(codes, length, ratio) == _entry(window, ratio, length, path)
                assert step.feeds[f"{kind}_entry_positions"][b, m] == window * ratio


@settings(max_examples=150, deadline=None)
@given(steps(), st.data())
def test_commit_tables_fold_append_and_place_accepted_rows(
    drawn: tuple[tables.StepTables, list[list[int]]], data: st.DataObject
) -> None:
    step, own = drawn
    lines = [path_of(tree, data.draw(st.integers(0, len(tree) - 1))) for tree in own]
    counts = np.array([data.draw(st.integers(0, len(line))) for line in lines])
    path = np.array([line + [-1] * (max(map(len, lines)) - len(line)) for line in lines])
    feeds = tables.commit_tables(SIZES, step, path, counts)
    assert feeds["stream_dst"].tolist() == [
        1 + int(slot) * SIZES.max_commit + (int(length) + t) % SIZES.max_commit
        for slot, length, count in zip(step.seqs.slots, step.seqs.lengths, counts, strict=True)
        for t in range(count)
    ]
    width = step.tree.parents.shape[1]
    kept = [line[:count] for line, count in zip(lines, counts, strict=True)]
    assert feeds["accepted"].tolist() == [b * width + n for b, nodes in enumerate(kept) for n in nodes]
    _check_window(step, kept, feeds)
    for kind, ratio in KINDS:
        _check_emitted(kind, ratio, step, kept, feeds)
        for b, nodes in enumerate(kept):
            length = int(step.seqs.lengths[b])
            end = length + len(nodes)
            start = end // ratio * ratio
            states = [_rows("B", range(start, end), length, nodes)]
            if kind == "csa":
                before = _rows("A", range(start - ratio, start), length, nodes)
                states = [before, _rows("A", range(start, end), length, nodes), *states]
            got = [_expand(row, length, ratio) for row in feeds[f"{kind}_fold_table"][b].tolist()]
            assert got == states


def _check_window(step: tables.StepTables, kept: list[list[int]], feeds: tables.Feeds) -> None:
    """Each row goes to its ring place, or to the bin where the same commit brings a newer row for that place."""
    window = []
    for b, nodes in enumerate(kept):
        length, slot = int(step.seqs.lengths[b]), int(step.seqs.slots[b])
        newest = {(length + t) % SIZES.window: t for t in range(len(nodes))}
        for t in range(len(nodes)):
            place = (length + t) % SIZES.window
            window.append(1 + slot * SIZES.window + place if newest[place] == t else None)
    for got, row in zip(feeds["window_dst"].tolist(), window, strict=True):
        assert got == row if row is not None else 1 <= got <= SIZES.window


def _check_emitted(kind: str, ratio: int, step: tables.StepTables, kept: list[list[int]], feeds: tables.Feeds) -> None:
    """Each completed window of an accepted path goes to its page row, and nothing else."""
    per_page, most = SIZES.page_tokens // ratio, step.feeds[f"{kind}_pool_table"].shape[1]
    expected = set()
    for b, path in enumerate(kept):
        for t, n in enumerate(path):
            position = int(step.seqs.lengths[b]) + t
            if (position + 1) % ratio == 0:
                index = _boundaries(step, kind, b).index(n)
                page = int(step.seqs.pages[b, position // SIZES.page_tokens])
                row = 1 + page * per_page + position % SIZES.page_tokens // ratio
                expected.add((b * most + index, row))
    got = list(zip(feeds[f"{kind}_emitted"].tolist(), feeds[f"{kind}_dst"].tolist(), strict=True))
    assert set(got) == expected and len(got) == len(expected)


# Masks and gathered rows.


@settings(max_examples=100, deadline=None)
@given(steps())
def test_step_tables_show_each_node_its_window_its_path_and_its_entries(
    drawn: tuple[tables.StepTables, list[list[int]]],
) -> None:
    step, own = drawn
    feeds = step.feeds
    for b, tree in enumerate(own):
        length = int(step.seqs.lengths[b])
        for n in range(len(tree)):
            path = path_of(tree, n)
            position = length + len(path) - 1
            assert feeds["positions"][b, n] == position
            visible = range(max(0, position - SIZES.window + 1), position + 1)
            ring = [1 + int(step.seqs.slots[b]) * SIZES.window + p % SIZES.window for p in visible if p < length]
            seen = np.isfinite(feeds["node_mask"][b, n])
            rows = feeds["window_rows"].shape[1]
            assert seen[0] and feeds["window_rows"][b, 0] == 0
            assert sorted(feeds["window_rows"][b, seen[:rows]].tolist()) == sorted([0, *ring])
            assert np.flatnonzero(seen[rows:]).tolist() == sorted(path[p - length] for p in visible if p >= length)
            for kind, ratio in KINDS:
                _check_entries(kind, ratio, step, b, n, path)


def _check_entries(kind: str, ratio: int, step: tables.StepTables, b: int, n: int, path: list[int]) -> None:
    """A node sees the committed entries and those that its own path completes, itself included."""
    length = int(step.seqs.lengths[b])
    per_page = SIZES.page_tokens // ratio
    committed = [1 + int(step.seqs.pages[b, w // per_page]) * per_page + w % per_page for w in range(length // ratio)]
    rows, nodes = step.feeds[f"{kind}_rows"][b], _boundaries(step, kind, b)
    mask = step.feeds[f"{kind}_mask"][b, n]
    seen = np.isfinite(mask)
    assert len(mask) == len(rows) + step.feeds[f"{kind}_pool_table"].shape[1] and (mask[seen] == 0).all()
    assert rows[seen[: len(rows)]].tolist() == committed
    ends = [k for t, k in enumerate(path) if (length + t + 1) % ratio == 0]
    assert [nodes[i] for i in np.flatnonzero(seen[len(rows) :])] == sorted(ends)


@st.composite
def drafts(draw: st.DrawFn) -> tuple[tables.Sequences, np.ndarray, np.ndarray, int]:
    """Sequences, pending rows (one at least), next tokens, draft steps."""
    count = draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    pending = np.array(draw(st.lists(st.integers(1, 64), min_size=count, max_size=count)))
    lengths = pending + draw(st.lists(st.integers(0, 200), min_size=count, max_size=count))
    slots = 1 + rng.permutation(SIZES.max_batch_size)[:count]
    seqs = tables.Sequences(slots, lengths, np.zeros((count, SIZES.pages_per_seq), np.int64))
    return seqs, pending, rng.integers(0, CONFIG.vocab_size, (count, int(pending.max()))), draw(st.integers(0, 4))


@settings(max_examples=100, deadline=None)
@given(drafts())
def test_draft_tables_show_each_row_the_window_before_it(
    drawn: tuple[tables.Sequences, np.ndarray, np.ndarray, int],
) -> None:
    seqs, pending, following, steps = drawn
    feeds, kept = tables.draft_tables(SIZES, seqs, pending, following, steps)
    width = following.shape[1]
    assert kept["mtp_accepted"].tolist() == [b * width + i for b, p in enumerate(pending) for i in range(p)]
    for b, (length, slot) in enumerate(zip(seqs.lengths.tolist(), seqs.slots.tolist(), strict=True)):
        first = length - int(pending[b])
        queries = [(feeds["catchup_mask"][b, i], first + i) for i in range(pending[b])]
        if steps > 1:  # levels 2, 3, ... follow the root, which is at `length`
            assert feeds["level_mask"].shape[1] == steps - 1
            queries += [(feeds["level_mask"][b, level], length + level) for level in range(steps - 1)]
        for mask, position in queries:
            visible = range(max(0, position - SIZES.window + 1), position + 1)
            seen, rows = np.isfinite(mask), feeds["mtp_window_rows"].shape[1]
            ring = [1 + slot * SIZES.window + p % SIZES.window for p in visible if p < first]
            assert sorted(feeds["mtp_window_rows"][b, seen[:rows]].tolist()) == sorted([0, *ring])
            assert np.flatnonzero(seen[rows:]).tolist() == [p - first for p in visible if first <= p < length]
        streams = [1 + slot * SIZES.max_commit + p % SIZES.max_commit for p in range(first, length)]
        assert feeds["stream_rows"][b].tolist() == streams + [0] * (width - len(streams))
        assert feeds["positions"][b, : pending[b]].tolist() == list(range(first, length))
        assert feeds["next_tokens"][b, : pending[b]].tolist() == following[b, : pending[b]].tolist()
        if steps:
            assert feeds["last_row"][b, 0] == pending[b] - 1 and feeds["root_position"][b, 0] == length


@settings(max_examples=100, deadline=None)
@given(drafts())
def test_the_drafter_keeps_the_newest_row_of_every_ring_place(
    drawn: tuple[tables.Sequences, np.ndarray, np.ndarray, int],
) -> None:
    seqs, pending, following, _ = drawn
    _, kept = tables.draft_tables(SIZES, seqs, pending, following, 0)
    got = iter(kept["mtp_dst"].tolist())
    for slot, length, count in zip(seqs.slots.tolist(), seqs.lengths.tolist(), pending.tolist(), strict=True):
        for position in range(length - count, length):
            row = next(got)
            if position >= length - SIZES.window:
                assert row == 1 + slot * SIZES.window + position % SIZES.window
            else:
                assert 1 <= row <= SIZES.window, "an outdated row goes to the bin"
