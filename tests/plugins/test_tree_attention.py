"""Tree attention against its float64 reference: window, nodes, entries and branch entries; one node, chains, trees; splits; NaN."""

import numpy as np
import pytest
import torch
from v4tree_plugins.tree_attention import naive_tree_attention, pack_masks, tree_attention

from tests.plugins import cases

KEYS = (1, 3, 5, 7)
"""Where window, nodes, entries and branch are among the operands."""


def inputs(
    kind: str, heads: int, dim: int, rope: int, dtype: str, lengths: list[int], nodes: list[int], shape: str, seed: int
):
    """Operands of a pass of one layer; kind `swa` has no entries. NaN in every row that no table or mask names."""
    sizes, step = cases.random_step(seed, lengths, nodes, shape)
    draw = cases.Draws(cases.DTYPES[dtype], np.random.default_rng(seed))
    b, n = step.positions.shape
    real = cases.to_torch(cases.real_nodes(step))
    own = draw.tensor(b, n, dim)
    own[~real] = float("nan")
    window = draw.pool(sizes.window_rows, step.feeds["window_rows"], dim)
    if kind == "swa":
        entries, rows = draw.pool(1, np.zeros(1, int), dim), np.zeros((b, 0), np.int64)
        branch, mask = draw.tensor(b, 0, dim), np.zeros((b, n, 0), np.float32)
    else:
        rows, mask = step.feeds[f"{kind}_rows"], step.feeds[f"{kind}_mask"]
        entries = draw.pool(sizes.csa_rows if kind == "csa" else sizes.hca_rows, rows, dim)
        branch = draw.tensor(b, step.feeds[f"{kind}_pool_table"].shape[1], dim)
        branch[cases.to_torch(~cases.real_boundaries(step, kind))] = float("nan")
    cos, sin = cases.rotation(step.positions, rope)
    sink = draw.tensor(heads)
    q = draw.tensor(b, n, heads, dim)
    return real, [
        q,
        window,
        step.feeds["window_rows"],
        own,
        step.feeds["node_mask"],
        entries,
        rows,
        branch,
        mask,
        sink,
        cos,
        sin,
    ]


def run(operands: list, scale: float, **tiles: int) -> torch.Tensor:
    return tree_attention(
        *[cases.to_torch(x) if isinstance(x, np.ndarray) else x for x in operands], scale=scale, **tiles
    )


def reference(operands: list, scale: float) -> np.ndarray:
    return naive_tree_attention(*[cases.f64(x) if isinstance(x, torch.Tensor) else x for x in operands], scale)


def check(kind: str, dtype: str, lengths: list[int], nodes: list[int], *, heads: int = 16, dim: int = 64, rope: int = 16,
          shape: str = "tree", seed: int = 0, **tiles: int) -> None:  # fmt: skip
    real, operands = inputs(kind, heads, dim, rope, dtype, lengths, nodes, shape, seed)
    got, want = run(operands, dim**-0.5, **tiles), reference(operands, dim**-0.5)
    assert cases.relative_error(got[real], want[real.cpu().numpy()]) <= cases.TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("kind", ["swa", "csa", "hca"])
def test_trees_at_page_and_window_boundaries(kind: str, dtype: str) -> None:
    check(kind, dtype, [0, 5, 126, 129, 255, 258], [6, 1, 5, 6, 4, 6])


@pytest.mark.parametrize("kind", ["swa", "csa", "hca"])
@pytest.mark.parametrize(("splits", "dtype"), [(2, "fp32"), (5, "bf16"), (5, "fp16"), (16, "fp32")])
def test_splits(kind: str, splits: int, dtype: str) -> None:
    check(kind, dtype, [0, 140], [3, 5], splits=splits)


@pytest.mark.parametrize("phase", range(4))
def test_phases(phase: int) -> None:
    check("csa", "fp32", [124 + phase, 256 + phase], [6, 6], seed=phase)
    check("hca", "fp32", [124 + phase, 256 + phase], [6, 6], seed=phase)


@pytest.mark.parametrize(("kind", "dtype"), [("swa", "fp32"), ("csa", "bf16"), ("hca", "fp32"), ("hca", "bf16")])
def test_every_phase_of_a_long_window(kind: str, dtype: str) -> None:
    """Random trees behind 128 lengths in a row: the ring wraps, windows end in the tree, and HCA has no, one or two entries."""
    check(kind, dtype, list(range(66, 194)), [4] * 128, heads=4, block_k=64)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_one_node(dtype: str) -> None:
    check("csa", dtype, [200], [1])
    check("swa", dtype, [0], [1])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_chain_and_64_node_tree(dtype: str) -> None:
    check("hca", dtype, [120], [64], heads=4, shape="chain", block_k=64)
    check("csa", dtype, [70], [64], heads=4, block_k=64)


@pytest.mark.parametrize("heads", [64, 128])
def test_full_width(heads: int) -> None:
    check("csa", "bf16", [9], [3], heads=heads, dim=512, rope=64, block_m=64)


def test_selected_rows_per_node() -> None:
    """Every node with its own selection of entries gives what the shared list under a mask gives."""
    _, operands = inputs("csa", 16, 64, 16, "fp32", [200], [5], "tree", 3)
    rows, mask = operands[6], operands[8].copy()
    entries = rows.shape[1]
    rng = np.random.default_rng(0)
    picked = np.stack([rng.permutation(entries)[:8] for _ in range(5)])[None]
    dense = np.full((1, 5, entries), -np.inf, np.float32)
    np.put_along_axis(dense, picked, 0, axis=2)
    mask[:, :, :entries] = dense
    operands[8] = mask
    want = run(operands, 0.125)
    operands[6] = rows[:, picked[0]]
    operands[8] = np.concatenate([np.zeros((1, 5, 8), np.float32), mask[:, :, entries:]], axis=2)
    assert torch.allclose(run(operands, 0.125), want, atol=1e-6)
    assert cases.relative_error(run(operands, 0.125), reference(operands, 0.125)) <= 1e-4


@pytest.mark.parametrize("kind", ["swa", "csa", "hca"])
def test_packed_masks(kind: str) -> None:
    """Four integers a node say the same as both additive masks."""
    real, operands = inputs(kind, 16, 64, 16, "fp32", [0, 126, 250], [6, 20, 5], "tree", 1)
    want = run(operands, 0.125, splits=2)
    operands[4] = operands[8] = pack_masks(operands[4], operands[8], operands[2].shape[1], operands[6].shape[1])
    assert torch.equal(run(operands, 0.125, splits=2)[real], want[real])


def test_packed_64_nodes() -> None:
    real, operands = inputs("csa", 4, 64, 16, "fp32", [70], [64], "chain", 0)
    want = run(operands, 0.125, block_k=64)
    operands[4] = operands[8] = pack_masks(operands[4], operands[8], operands[2].shape[1], operands[6].shape[1])
    assert torch.equal(run(operands, 0.125, block_k=64)[real], want[real])


def test_what_cannot_be_packed_is_refused() -> None:
    gap = np.array([[[0, -np.inf, 0, 0]]], np.float32)
    with pytest.raises(ValueError, match="additive masks"):
        pack_masks(gap, gap[:, :, :1], 3, 0)
