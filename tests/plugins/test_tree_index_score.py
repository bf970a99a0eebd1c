"""Tree index score against its float64 reference: paged and branch entries, off-path -inf, unowned rows NaN."""

import numpy as np
import pytest
from v4tree_plugins.tree_index_score import naive_tree_index_score, tree_index_score

from tests.plugins import cases


def check(heads: int, dim: int, dtype: str, lengths: list[int], nodes: list[int], seed: int = 0) -> None:
    sizes, step = cases.random_step(seed, lengths, nodes)
    draw = cases.Draws(cases.DTYPES[dtype], np.random.default_rng(seed))
    rows, mask = step.feeds["csa_rows"], step.feeds["csa_mask"]
    b, n = mask.shape[:2]
    entries = draw.pool(sizes.csa_rows, rows, dim)
    branch = draw.tensor(b, step.feeds["csa_pool_table"].shape[1], dim)
    branch[cases.to_torch(~cases.real_boundaries(step, "csa"))] = float("nan")
    query, weights = draw.tensor(b, n, heads, dim), draw.tensor(b, n, heads, scale=(dim * heads) ** -0.5)
    got = tree_index_score(query, weights, entries, cases.to_torch(rows), branch, cases.to_torch(mask))
    want = naive_tree_index_score(*map(cases.f64, (query, weights, entries)), rows, cases.f64(branch), mask)
    hidden = np.isinf(want)
    assert np.array_equal(np.isneginf(cases.f64(got)), hidden)
    assert cases.relative_error(got[cases.to_torch(~hidden)], want[~hidden]) <= cases.TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_phases_and_page_boundaries(dtype: str) -> None:
    check(16, 128, dtype, [0, 3, 4, 254, 257, 510], [7, 1, 5, 7, 6, 7])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_64_heads_64_nodes(dtype: str) -> None:
    check(64, 128, dtype, [133], [64])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_one_node_and_nothing_to_score(dtype: str) -> None:
    check(16, 128, dtype, [130], [1])
    check(16, 128, dtype, [1], [1])


def test_every_phase_of_a_long_window() -> None:
    check(16, 128, "fp32", list(range(128, 256)), [5] * 128)
