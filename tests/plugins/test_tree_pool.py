"""Tree pool against its float64 reference: all phases, branches, both ratios and widths, unowned rows NaN."""

import numpy as np
import pytest
import torch
from v4tree_plugins.tree_pool import naive_tree_pool, tree_pool

from tests.plugins import cases


def check(
    kind: str, dim: int, dtype: str, lengths: list[int], nodes: list[int], shape: str = "tree", seed: int = 0
) -> int:
    """Runs one case and returns its number of real boundary nodes."""
    sizes, step = cases.random_step(seed, lengths, nodes, shape)
    draw = cases.Draws(cases.DTYPES[dtype], np.random.default_rng(seed))
    state_draw = cases.Draws(torch.float32, np.random.default_rng(seed + 1))
    table, slots = step.feeds[f"{kind}_pool_table"], step.feeds["slots"]
    states, halves = (3, 2) if kind == "csa" else (1, 1)
    state = state_draw.pool(sizes.num_slots, slots, states, 2 * dim)
    raw = draw.tensor(len(lengths), max(nodes) * halves, 2 * dim)
    used = np.zeros(raw.shape[:2], bool)
    for b, line in enumerate(table):
        used[b, np.unique(line[line > states] - states - 1)] = True
    raw[cases.to_torch(~used)] = float("nan")
    norm = draw.tensor(dim)
    cos, sin = cases.rotation(step.feeds[f"{kind}_entry_positions"], 64)
    got = tree_pool(
        state, *map(cases.to_torch, (slots,)), raw, cases.to_torch(table), norm, cos, sin, rope_dim=64, eps=1e-6
    )
    want = naive_tree_pool(
        *map(cases.f64, (state,)), slots, cases.f64(raw), table, cases.f64(norm), cases.f64(cos), cases.f64(sin), 1e-6
    )
    real = cases.real_boundaries(step, kind)
    assert got.shape == want.shape
    assert cases.relative_error(got[cases.to_torch(real)], want[real]) <= cases.TOLERANCE[dtype]
    return int(real.sum())


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("dim", [512, 128])
def test_csa_at_every_phase(dim: int, dtype: str) -> None:
    assert sum(check("csa", dim, dtype, [length], [9], seed=length) for length in range(9)) > 9


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("dim", [512, 128])
def test_hca_across_the_boundary(dim: int, dtype: str) -> None:
    assert (
        sum(check("hca", dim, dtype, [length], [12], "chain", seed=length) for length in (0, 116, 120, 127, 250, 255))
        == 5
    )


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_hca_at_every_phase(dtype: str) -> None:
    """64 chain nodes behind every prefix of a window, half of which they complete; random trees behind those that they may complete."""
    assert check("hca", 128, dtype, list(range(128)), [64] * 128, "chain") == 64
    assert check("hca", 128, dtype, list(range(100, 132)), [40] * 32) > 30


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_64_nodes_batched_at_page_boundaries(dtype: str) -> None:
    assert check("csa", 128, dtype, [0, 1, 254, 255, 256, 257], [64, 1, 64, 2, 33, 64]) > 30


def test_extreme_scores() -> None:
    """Scores far apart neither overflow nor lose the smaller ones' exactness."""
    state = torch.tensor([[[3e4] * 8 + [2.0] * 8]], device=cases.DEVICE)
    raw = torch.tensor([[[-3e4] * 8 + [7.0] * 8] * 2], device=cases.DEVICE)
    table = torch.tensor([[[0, 2, 3, 1], [1, 1, 1, 1]]], device=cases.DEVICE)
    one, zero, slots = (
        torch.ones_like(raw[:, :, :2]),
        torch.zeros_like(raw[:, :, :2]),
        torch.zeros_like(table[0, 0, :1]),
    )
    got = tree_pool(state, slots, raw, table, torch.ones_like(raw[0, 0, :8]), one, zero, rope_dim=4, eps=1e-6)
    assert np.abs(cases.f64(got[0, 0]) - 1).max() < 1e-5
    assert not got[0, 1].any()
