"""Law 3: `commit(verify(state, tree), path[:n])` equals n one-token steps, for every tree, path and cut: to the bit with the native
operators, within rounding with others.

Everything that a pass has no business reading is NaN: other slots, unused ring rows, pages not allocated, entries
beyond the count, streams not pending, the bin, and the scratch of rejected nodes. The zero rows must stay zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from trtllm_v4tree.runtime import tables
from trtllm_v4tree.sizes import EngineSizes

from .harness import (
    BIN,
    Built,
    Drafted,
    Driver,
    Held,
    Pools,
    Tree,
    Verified,
    as_array,
    bin_rows,
    chain_tree,
    leaf_paths,
    owned_rows,
    random_path,
    window_held,
    zero_rows,
)
from .oracle.trees import SHAPES, random_tree

POOLS = 1e-5
"""Tolerance of every pool where passes of different widths round differently."""
STREAMS = 5e-5
"""Tolerance of the streams, which are not normed and some ten times larger."""
NODES = 9


@dataclass(frozen=True)
class Stepped:
    """A sequence after the one-token steps to a node, and the streams of each of these tokens."""

    held: Held
    owned: Pools
    streams: list[np.ndarray]


def check_equal(driver: Driver, name: str, got: np.ndarray, expected: np.ndarray) -> None:
    """The same bits, or the same numbers but for rounding where the executor promises no more."""
    if driver.executor.bit_exact:
        np.testing.assert_array_equal(got, expected, err_msg=name)
    else:
        tolerance = STREAMS if name == "streams" else POOLS
        np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance, err_msg=name)


def step_every_node(driver: Driver, base: Pools, held: Held, tree: Tree) -> list[Stepped]:
    """The state after one-at-a-time decoding of the path to each node."""
    parents, tokens = tree
    done: list[Stepped] = []
    saved: list[Pools] = []
    for node, parent in enumerate(parents):
        driver.restore(base if parent < 0 else saved[parent])
        before = held if parent < 0 else done[parent].held
        [after] = driver.advance([before], [chain_tree(tokens[node : node + 1])], [[0]], poisoned=True)
        owned = driver.read(after)
        earlier = [] if parent < 0 else done[parent].streams
        done.append(Stepped(after, owned, [*earlier, owned["streams"][0, 0]]))
        saved.append(driver.save())
    return done


def check_law(driver: Driver, batch: list[Held], trees: list[Tree], every_cut: bool = True) -> None:
    """Commits every path and cut (of all sequences at once) from the present state and compares with single steps."""
    driver.poison(batch)
    base = driver.save()
    stepped = [step_every_node(driver, base, h, tree) for h, tree in zip(batch, trees, strict=True)]
    driver.restore(base)
    drafted = _catch_up(driver, batch, trees)
    done = driver.verify(batch, trees)
    _equal(driver.save(), base, "verify and draft must not write")
    lines = [_cuts(parents, every_cut) for parents, _ in trees]
    for turn in range(max(map(len, lines))):
        chosen = [line[turn % len(line)] for line in lines]
        paths, keep = [p for p, _ in chosen], [n for _, n in chosen]
        driver.restore(base)
        clean = driver.poison_scratch(done, paths, keep)
        after = driver.commit(clean, paths, driver.poison_drafter(drafted), keep)
        _check_writes(driver, base, batch, after)
        for b, (path, n) in enumerate(chosen):
            _check_copies(driver, base, clean, drafted, b, path[:n], after[b])
            if n:
                _check_state(driver, stepped[b][path[n - 1]], after[b])
        if all(keep):
            _check_drafter(driver, after, stepped, chosen)


def _cuts(parents: np.ndarray, every: bool) -> list[tuple[list[int], int]]:
    """Every path to a leaf with every number of nodes to keep of it, or only all of them."""
    return [(path, n) for path in leaf_paths(parents) for n in range(0 if every else len(path), len(path) + 1)]


def _catch_up(driver: Driver, batch: list[Held], trees: list[Tree]) -> Drafted | None:
    return driver.draft(batch, [tokens[0] for _, tokens in trees]) if any(h.pending for h in batch) else None


def _equal(pools: Pools, expected: Pools, why: str) -> None:
    for name, pool in pools.items():
        np.testing.assert_array_equal(pool, expected[name], err_msg=f"{name}: {why}")


def _check_writes(driver: Driver, base: Pools, before: list[Held], after: list[Held]) -> None:
    """Only rows that the sequences own afterwards, or that just left a ring, and the bin may have changed."""
    for name in driver.specs:
        pool = driver.executor.state(name)
        assert (pool[zero_rows(driver.sizes, name)] == 0).all(), f"{name}: a commit wrote the zero row"
        free = np.ones(len(pool), bool)
        free[bin_rows(driver.sizes, name)] = False
        for old, new in zip(before, after, strict=True):
            # One row of a ring is held but seen by nobody; the drafter's rows move on by what was pending.
            for h in (new, replace(new, ids=new.ids[:-1]), replace(new, ids=old.ids, pending=0)):
                free[owned_rows(driver.sizes, [name], h)[name]] = False
        np.testing.assert_array_equal(pool[free], base[name][free], err_msg=f"{name}: a commit wrote a foreign row")


def _check_copies(
    driver: Driver, base: Pools, done: Verified, drafted: Drafted | None, b: int, nodes: list[int], after: Held
) -> None:
    """Rows that stay are untouched; rows that a commit copies are the scratch rows, bit for bit."""
    s, before = driver.sizes, done.held[b]
    scratch = {name: as_array(value) for name, value in done.scratch.items()}
    old = {name: base[name][rows] for name, rows in owned_rows(s, driver.specs, before).items()}
    new = driver.read(after)
    seen_before, seen = window_held(s, before.length), window_held(s, after.length)
    window = {p: old["window_kv"][:, i] for i, p in enumerate(seen_before)}
    window |= {before.length + t: scratch["window_scratch"][:, b, n] for t, n in enumerate(nodes)}
    _same(new["window_kv"], [window[p] for p in seen], "window_kv")
    for kind, prefixes, ratio in (("csa", ("csa", "idx"), s.csa_ratio), ("hca", ("hca",), s.hca_ratio)):
        for prefix in (p for p in prefixes if f"{p}_entries" in driver.specs):
            branch, index = scratch[f"{prefix}_branch"], done.boundaries(kind)
            ends = [n for t, n in enumerate(nodes) if (before.length + t + 1) % ratio == 0]
            entries = [*old[f"{prefix}_entries"].swapaxes(0, 1), *(branch[:, b, index[b, n]] for n in ends)]
            _same(new[f"{prefix}_entries"], entries, f"{prefix}_entries")
            states, raw = f"{prefix}_state", scratch[f"{prefix}_raw"][:, b]
            _check_folds(old[states][:, 0], new[states][:, 0], raw, before.length, nodes, ratio)
    _same(new["streams"], [scratch["streams_scratch"][b, n][None] for n in nodes], "streams")
    first = before.length - before.pending
    drafter = {p: old["mtp_window_kv"][:, i] for i, p in enumerate(window_held(s, first))}
    if drafted is not None:
        rows = as_array(drafted.result.scratch["mtp_scratch"])[b]
        drafter |= {first + i: rows[i][None] for i in range(before.pending)}
    _same(new["mtp_window_kv"], [drafter[p] for p in window_held(s, after.length - after.pending)], "mtp_window_kv")


def _same(pool: np.ndarray, rows: list[np.ndarray], name: str) -> None:
    assert pool.shape[1] == len(rows), name
    if rows:
        np.testing.assert_array_equal(pool, np.stack(rows, axis=1), err_msg=f"{name}: not the committed rows")


def _check_folds(old: np.ndarray, new: np.ndarray, raw: np.ndarray, length: int, nodes: list[int], ratio: int) -> None:
    """Folds of a single row copy it: states that nothing joined, and an open window of one token."""
    end = length + len(nodes)
    if not nodes:
        np.testing.assert_array_equal(new, old, err_msg="a commit of nothing changed a compressor state")
    if old.shape[1] == 3 and end // ratio == length // ratio:
        np.testing.assert_array_equal(new[:, 0], old[:, 0], err_msg="prev changed within a window")
    if nodes and end % ratio == 1:
        single = raw[:, nodes[-1]].reshape(len(raw), -1, new.shape[-1])
        np.testing.assert_array_equal(new[:, -single.shape[1] :], single, err_msg="one open row is not copied")


def _check_state(driver: Driver, expected: Stepped, after: Held) -> None:
    """The trunk's state and the pending streams against single steps."""
    assert after.ids == expected.held.ids
    got = driver.read(after)
    for name in driver.specs:
        if name not in ("streams", "mtp_window_kv"):
            check_equal(driver, name, got[name], expected.owned[name])
    check_equal(driver, "streams", got["streams"], np.array(expected.streams)[None])


def _check_drafter(
    driver: Driver, batch: list[Held], stepped: list[list[Stepped]], chosen: list[tuple[list[int], int]]
) -> None:
    """After one more round the drafter has read the accepted rows: all but its newest row against single steps."""
    trees = [chain_tree([7])] * len(batch)
    after = driver.advance(batch, trees, [[0]] * len(batch), poisoned=True)
    for b, (path, n) in enumerate(chosen):
        expected = stepped[b][path[n - 1]].owned["mtp_window_kv"]
        got = driver.read(after[b])["mtp_window_kv"][:, :-1]
        expected = expected[:, expected.shape[1] - got.shape[1] :]
        check_equal(driver, "mtp_window_kv", got, expected)
        assert np.isfinite(driver.read(after[b])["mtp_window_kv"]).all()


def draw_batch(driver: Driver, rng: np.random.Generator, lengths: list[int]) -> list[Held]:
    """Sequences of random tokens, prefilled in chunks of random sizes with everything else poisoned."""
    batch = driver.start(rng, len(lengths))
    for b, length in enumerate(lengths):
        ids = rng.integers(0, driver.config.vocab_size, length).tolist()
        chunks = rng.integers(1, driver.sizes.prefill_chunk + 1, 8).tolist()
        batch[b] = driver.prefill(batch[b], ids, chunks, poisoned=True, beside=batch[:b] + batch[b + 1 :])
    return batch


def draw_trees(rng: np.random.Generator, driver: Driver, count: int, turn: int) -> list[Tree]:
    return [random_tree(rng, NODES, driver.config.vocab_size, SHAPES[(turn + b) % len(SHAPES)]) for b in range(count)]


@pytest.mark.parametrize(
    ("name", "starts", "rounds"),
    [
        pytest.param("w16", [0, 17, 50, 99], 16, marks=pytest.mark.slow),
        pytest.param("mixed", [1, 14, 35, 246], 16, marks=pytest.mark.slow),
        pytest.param("w128", [0, 160, 192, 224], 32, marks=pytest.mark.slow),
        pytest.param("w128", [96, 32, 64, 250], 32, marks=pytest.mark.slow),
    ],
)
def test_commit_equals_single_steps_at_every_phase(
    tiny: Callable[[str], Built], name: str, starts: list[int], rounds: int
) -> None:
    """Sequences grow by one token a round, so every phase mod 4 and mod the HCA ratio is met."""
    driver, rng = tiny(name).driver, np.random.default_rng(23)
    batch = draw_batch(driver, rng, starts)
    for turn in range(rounds):
        trees = draw_trees(rng, driver, len(batch), turn)
        driver.poison(batch)
        base = driver.save()
        check_law(driver, batch, trees)
        driver.restore(base)
        batch = driver.advance(batch, trees, [[0]] * len(batch))


def test_commits_of_long_paths_between_laws(built: Built) -> None:
    """The law again after commits of whole paths, so that the drafter has several rows pending."""
    driver, rng = built.driver, np.random.default_rng(31)
    batch = draw_batch(driver, rng, [6, 61, 125])
    for turn in range(5):
        trees = draw_trees(rng, driver, len(batch), turn + 1)
        driver.poison(batch)
        base = driver.save()
        check_law(driver, batch, trees, every_cut=False)
        driver.restore(base)
        batch = driver.advance(batch, trees, [random_path(rng, parents) for parents, _ in trees], poisoned=True)


def test_the_law_on_operators_of_onnx_runtime(tiny: Callable[..., Built]) -> None:
    driver, rng = tiny("w16", "onnxruntime").driver, np.random.default_rng(37)
    batch = draw_batch(driver, rng, [21, 64])
    check_law(driver, batch, draw_trees(rng, driver, 2, turn=0))


def test_logits_of_a_node_are_those_of_its_path_in_any_cut(built: Built) -> None:
    """Through a tree beside other sequences, and as a chain alone that is committed in two parts."""
    driver, rng = built.driver, np.random.default_rng(47)
    batch = draw_batch(driver, rng, [13, 63, 130])
    trees = draw_trees(rng, driver, 3, turn=2)
    driver.poison(batch)
    base = driver.save()
    logits = driver.verify(batch, trees).logits
    for b, (parents, tokens) in enumerate(trees):
        for path in (path for path in leaf_paths(parents) if len(path) > 1):
            cut = int(rng.integers(1, len(path)))
            driver.restore(base)
            [held] = driver.advance([batch[b]], [chain_tree(tokens[path[:cut]])], [list(range(cut))], poisoned=True)
            alone = driver.verify([held], [chain_tree(tokens[path[cut:]])]).logits[0]
            check_equal(driver, "streams", logits[b, path[cut:]], alone)


@pytest.mark.parametrize("chunks", [[3], [17], [64], [1, 2, 4, 8, 16, 32, 64], [63, 1, 5]])
@pytest.mark.parametrize("length", [67, 130])
def test_prefill_in_chunks_equals_token_by_token(built: Built, length: int, chunks: list[int]) -> None:
    """Prefill is a chain that is accepted whole: its chunking leaves no trace but rounding."""
    driver, rng = built.driver, np.random.default_rng(length)
    ids = rng.integers(0, driver.config.vocab_size, length).tolist()
    reads = []
    for sizes in ([1], chunks):
        [held] = driver.start(np.random.default_rng(length), 1)
        held = driver.prefill(held, ids, sizes, poisoned=True)
        [held] = driver.advance([held], [chain_tree([9])], [[0]], poisoned=True)  # the drafter reads the last chunk
        reads.append(driver.read(held))
    for name, expected in reads[0].items():
        check_equal(driver, name, reads[1][name], expected)


def test_padding_sequences_write_only_to_the_bin(built: Built) -> None:
    """Sequences without nodes in slot 0, whose state is NaN, leave the rest of the batch as it is alone."""
    driver, rng = built.driver, np.random.default_rng(53)
    batch = draw_batch(driver, rng, [19, 70])
    trees = draw_trees(rng, driver, 2, turn=3)
    paths = [random_path(rng, parents) for parents, _ in trees]
    driver.poison(batch)
    base, reads = driver.save(), []
    for padding in (0, 2):
        driver.restore(base)
        nobody = [Held(BIN[0], (BIN[1],) * driver.sizes.pages_per_seq)] * padding
        nothing = [chain_tree([])] * padding
        after = driver.advance(batch + nobody, trees + nothing, paths + [[]] * padding)
        _check_writes(driver, base, batch, after[:2])
        reads.append([driver.read(h) for h in after[:2]])
    for alone, padded in zip(*reads, strict=True):
        for name, expected in alone.items():
            check_equal(driver, name, padded[name], expected)


def _by_count(sizes: EngineSizes, step: tables.StepTables, path: np.ndarray, counts: np.ndarray, *rest: Any) -> Any:
    """A commit that takes the first nodes instead of the accepted ones."""
    return _right(sizes, step, np.broadcast_to(np.arange(path.shape[1]), path.shape), counts, *rest)


def _one_more(sizes: EngineSizes, step: tables.StepTables, path: np.ndarray, counts: np.ndarray, *rest: Any) -> Any:
    """A commit that keeps one node beyond the cut, where the path has one."""
    return _right(sizes, step, path, np.minimum(counts + 1, (path >= 0).sum(axis=1)), *rest)


def _stale_fold(sizes: EngineSizes, step: tables.StepTables, path: np.ndarray, counts: np.ndarray, *rest: Any) -> Any:
    """A commit that folds nothing into the open windows."""
    nothing = _right(sizes, step, path, np.zeros_like(counts), *rest)
    return _right(sizes, step, path, counts, *rest) | {k: v for k, v in nothing.items() if k.endswith("fold_table")}


_right = tables.commit_tables


@pytest.mark.parametrize("wrong", [_by_count, _one_more, _stale_fold])
def test_a_broken_commit_is_detected(
    tiny: Callable[[str], Built], monkeypatch: pytest.MonkeyPatch, wrong: Callable[..., tables.Feeds]
) -> None:
    driver, rng = tiny("w16").driver, np.random.default_rng(41)
    batch = draw_batch(driver, rng, [21])
    tree = np.array([-1, 0, 0, 1, 2, 4, 4, 6]), np.array([3, 5, 8, 13, 21, 34, 55, 89])
    check_law(driver, batch, [tree])

    def only_trees(sizes: EngineSizes, step: tables.StepTables, path: np.ndarray, *rest: Any) -> tables.Feeds:
        return (wrong if path.shape[1] > 1 else _right)(sizes, step, path, *rest)

    batch = draw_batch(driver, rng, [21])
    monkeypatch.setattr(tables, "commit_tables", only_trees)
    with pytest.raises(AssertionError):
        check_law(driver, batch, [tree])


@pytest.mark.parametrize("name", ["window_kv", "csa_state", "csa_entries", "hca_state", "hca_entries"])
def test_poison_in_an_owned_row_shows(tiny: Callable[[str], Built], name: str) -> None:
    """The harness itself: NaN in one row that a sequence owns reaches its logits, and no other sequence's.

    The indexer's pools are read through the row tables of the CSA pools; a NaN there only changes a selection.
    """
    driver, rng = tiny("w16").driver, np.random.default_rng(43)
    batch = draw_batch(driver, rng, [30, 25])
    trees = [chain_tree([5, 6, 7]), chain_tree([5, 6, 7])]
    assert np.isfinite(driver.verify(batch, trees).logits).all()
    row = owned_rows(driver.sizes, [name], batch[0])[name][0, -1]
    driver.executor.state(name)[row] = np.nan
    logits = driver.verify(batch, trees).logits
    assert np.isnan(logits[0, -1]).any() and np.isfinite(logits[1]).all()
