"""Commit kernels against their references, on the fold and row tables of real commits."""

import numpy as np
import pytest
import torch
from v4tree_plugins.commit import fold, naive_fold, naive_scatter_rows, scatter_rows

from tests.plugins import cases
from trtllm_v4tree.runtime.tables import climb, commit_tables


def commit_case(seed: int, lengths: list[int], nodes: list[int]):
    """Tables of a commit that keeps a random part of the path to the last node of every tree."""
    sizes, step = cases.random_step(seed, lengths, nodes)
    rng = np.random.default_rng(seed)
    paths = [climb(step.tree.parents[b].tolist(), count - 1, count) for b, count in enumerate(nodes)]
    counts = np.array([rng.integers(0, len(path) + 1) for path in paths])
    path = np.array([path + [0] * (max(nodes) - len(path)) for path in paths])
    return sizes, step, commit_tables(sizes, step, path, counts)


def check_fold(kind: str, dim: int, dtype: str, seed: int, lengths: list[int], nodes: list[int]) -> None:
    """A fold of two layers; states that no line names, raw rows that are not accepted and slots of nobody are NaN."""
    sizes, _, feeds = commit_case(seed, lengths, nodes)
    states, halves = (3, 2) if kind == "csa" else (1, 1)
    slots, table = feeds["slots"], feeds[f"{kind}_fold_table"]
    draw = cases.Draws(torch.float32, np.random.default_rng(seed))
    touched = np.concatenate([slots + layer * sizes.num_slots for layer in range(2)])
    state = draw.pool(2 * sizes.num_slots, touched, states, 2 * dim)
    raw = cases.Draws(cases.DTYPES[dtype], draw.rng).tensor(2, len(lengths), max(nodes) * halves, 2 * dim)
    for b, line in enumerate(table):
        unread = np.setdiff1d(np.arange(states), line)
        for at in (slots[b], slots[b] + sizes.num_slots):
            state[at, cases.to_torch(unread)] = float("nan")
        raw[:, b, cases.to_torch(np.setdiff1d(np.arange(raw.shape[2]), line - states - 1))] = float("nan")
    want = naive_fold(cases.f64(state), slots, cases.f64(raw), table)
    fold(state, cases.to_torch(slots), raw, cases.to_torch(table))
    assert cases.relative_error(state[cases.to_torch(touched)], want[touched]) <= 1e-5
    untouched = np.setdiff1d(np.arange(1, len(want)), touched)
    assert torch.isnan(state[cases.to_torch(untouched)]).all()


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("kind", ["csa", "hca"])
@pytest.mark.parametrize("dim", [128, 512])
def test_fold(kind: str, dim: int, dtype: str) -> None:
    """Every phase mod 4, empty caches, window and page boundaries; in fp32 whatever the dtype of the raw rows, which is exact."""
    for seed in range(6):
        check_fold(kind, dim, dtype, seed, [seed, 122 + seed, 251 + seed], [6, 9, 12])


@pytest.mark.parametrize("kind", ["csa", "hca"])
def test_fold_at_every_phase_of_a_long_window(kind: str) -> None:
    check_fold(kind, 128, "fp32", 0, list(range(128)), [7] * 128)


@pytest.mark.parametrize("kind", ["csa", "hca"])
def test_fold_of_one_and_of_64_nodes(kind: str) -> None:
    check_fold(kind, 128, "bf16", 1, [0, 3, 127, 255], [1, 1, 1, 1])
    check_fold(kind, 128, "bf16", 1, [0, 127, 200], [64, 64, 64])


def test_fold_of_one_row_is_bit_exact() -> None:
    draw = cases.Draws(torch.float32, np.random.default_rng(0))
    state, raw = draw.tensor(2, 1, 256), draw.tensor(1, 1, 3, 256)
    fold(state, cases.to_torch(np.array([1])), raw, cases.to_torch(np.array([[[1, 1, 3, 1]]])))
    assert torch.equal(state[1, 0], raw[0, 0, 1])


def check_scatter(scratch: torch.Tensor, source: np.ndarray, pool_rows: int, target: np.ndarray) -> None:
    """Named rows arrive bit for bit in a pool of NaN, which stays NaN elsewhere; scratch rows that are not named are NaN."""
    scratch[:, cases.to_torch(np.setdiff1d(np.arange(scratch.shape[1]), source))] = float("nan")
    pool = scratch.new_full((scratch.shape[0] * pool_rows, scratch.shape[2]), float("nan"))
    want = naive_scatter_rows(cases.f64(scratch), source, cases.f64(pool), target)
    scatter_rows(scratch, cases.to_torch(source), pool, cases.to_torch(target))
    assert np.array_equal(cases.f64(pool), want, equal_nan=True)
    assert np.isfinite(want).all(axis=1).sum() == len(scratch) * len(np.unique(target))


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("width", [64, 512, 1100])
def test_window_rows(width: int, dtype: str) -> None:
    """Empty caches, one node, 64 nodes, and the ends of ring and page."""
    sizes, step, feeds = commit_case(3, [0, 3, 126, 255, 130], [9, 1, 12, 12, 64])
    draw = cases.Draws(cases.DTYPES[dtype], np.random.default_rng(1))
    check_scatter(draw.tensor(4, step.positions.size, width), feeds["accepted"], sizes.window_rows, feeds["window_dst"])


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("kind", ["csa", "hca"])
def test_entries_across_pages(kind: str, dtype: str) -> None:
    """Accepted boundary nodes of random trees at the end of a page, of two pages, and in an empty cache."""
    emitted = 0
    for seed in range(8):
        sizes, step, feeds = commit_case(seed, [0, 250 + seed, 508 + seed % 4], [9, 12, 12])
        source, target = feeds[f"{kind}_emitted"], feeds[f"{kind}_dst"]
        scratch = cases.Draws(cases.DTYPES[dtype], np.random.default_rng(seed)).tensor(
            2, max(1, step.feeds[f"{kind}_pool_table"][:, :, 0].size), 128
        )
        check_scatter(scratch, source, sizes.csa_rows if kind == "csa" else sizes.hca_rows, target)
        emitted += len(source)
    assert emitted >= 4
