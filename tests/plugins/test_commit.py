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


@pytest.mark.parametrize("kind", ["csa", "hca"])
@pytest.mark.parametrize("dim", [128, 512])
def test_fold(kind: str, dim: int) -> None:
    for seed in range(6):
        lengths = [seed, 122 + seed, 251 + seed]
        sizes, _, feeds = commit_case(seed, lengths, [6, 9, 12])
        states, halves = (3, 2) if kind == "csa" else (1, 1)
        draw = cases.Draws(torch.float32, np.random.default_rng(seed))
        rows = np.concatenate([feeds["slots"] + layer * sizes.num_slots for layer in range(2)])
        state = draw.pool(2 * sizes.num_slots, rows, states, 2 * dim)
        raw, table = draw.tensor(2, 3, 12 * halves, 2 * dim), feeds[f"{kind}_fold_table"]
        want = naive_fold(cases.f64(state), feeds["slots"], cases.f64(raw), table)
        fold(state, cases.to_torch(feeds["slots"]), raw, cases.to_torch(table))
        touched = np.unique(rows)
        assert cases.relative_error(state[cases.to_torch(touched)], want[touched]) <= 1e-5
        untouched = np.setdiff1d(np.arange(1, len(want)), touched)
        assert torch.isnan(state[cases.to_torch(untouched)]).all()


def test_fold_of_one_row_is_bit_exact() -> None:
    draw = cases.Draws(torch.float32, np.random.default_rng(0))
    state, raw = draw.tensor(2, 1, 256), draw.tensor(1, 1, 3, 256)
    fold(state, cases.to_torch(np.array([1])), raw, cases.to_torch(np.array([[[1, 1, 3, 1]]])))
    assert torch.equal(state[1, 0], raw[0, 0, 1])


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("width", [64, 512, 1100])
def test_scatter_rows(width: int, dtype: str) -> None:
    sizes, step, feeds = commit_case(3, [3, 126], [9, 12])
    draw = cases.Draws(cases.DTYPES[dtype], np.random.default_rng(1))
    scratch = draw.tensor(4, step.positions.size, width)
    unused = np.setdiff1d(np.arange(step.positions.size), feeds["accepted"])
    scratch[:, cases.to_torch(unused)] = float("nan")
    pool = draw.tensor(4 * sizes.window_rows, width)
    want = naive_scatter_rows(cases.f64(scratch), feeds["accepted"], cases.f64(pool), feeds["window_dst"])
    scatter_rows(scratch, cases.to_torch(feeds["accepted"]), pool, cases.to_torch(feeds["window_dst"]))
    assert np.array_equal(cases.f64(pool), want)
