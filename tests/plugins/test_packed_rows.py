"""Packed rows: the quantiser against a loop and against torch's formats; attention over packed keys, and their commit."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from v4tree_plugins.commit import naive_scatter_rows, scatter_rows
from v4tree_plugins.packed_rows import E4M3, naive_pack_row, naive_unpack, pack_rows, row_bytes
from v4tree_plugins.tree_attention import naive_tree_attention, pack_masks

from tests.plugins import cases
from tests.plugins.test_commit import commit_case
from tests.plugins.test_tree_attention import KEYS, inputs, run
from trtllm_v4tree.accounting import FORMATS, CacheFormat, state_bytes, window_bytes
from trtllm_v4tree.bench.published import published
from trtllm_v4tree.sizes import EngineSizes

ROPE = 64
FP8 = next(cache for cache in FORMATS if cache.name == "packed FP8")


def hard_rows(dim: int) -> torch.Tensor:
    """fp32 rows [R, dim]: many magnitudes, ties of e4m3 and of bfloat16, powers of two at their block's limit, zeros, tiny values."""
    rng = np.random.default_rng(0)
    spread = rng.standard_normal((4, dim)) * 2.0 ** rng.integers(-12, 12, (4, dim // 64, 1)).repeat(64, 1).reshape(
        4, dim
    )
    near = E4M3[np.setdiff1d(np.arange(256), [127, 255])]
    ties = np.resize((near[:-1] + near[1:]) / 2, dim)
    ties[::64] = 448
    limits = np.outer([1, 1 + 2.0**-20, 1 - 2.0**-20], 448 * 2.0 ** np.arange(-8, 8)).ravel()
    blocks = (limits[:, None] * np.linspace(-1, 1, 64)).reshape(-1, 2 * 64).repeat(dim // 128, axis=1)
    halves = 1 + (2 * np.arange(dim) + 1) * 2.0**-9
    tiny = rng.standard_normal(dim) * 1e-6
    rows = np.stack([*spread, ties, halves, tiny, np.zeros(dim), *blocks]).astype(np.float32)
    return torch.from_numpy(rows).to(cases.DEVICE)


def written(packed: np.ndarray, dim: int) -> np.ndarray:
    """Without the padding, and with one zero."""
    out = packed[..., : dim + ROPE + (dim - ROPE) // 64].copy()
    codes = out[..., : dim - ROPE]
    codes[codes == 128] = 0
    return out


@pytest.mark.parametrize("dim", [128, 512])
def test_quantiser_against_a_loop(dim: int) -> None:
    rows = hard_rows(dim)
    want = np.stack([naive_pack_row(row, ROPE) for row in rows.cpu().numpy()])
    assert np.array_equal(written(pack_rows(rows, ROPE).cpu().numpy(), dim), written(want, dim))


def test_quantiser_against_torch() -> None:
    """float8_e4m3fn, float8_e8m0fnu and bfloat16 of torch; 2 ** ceil(log2(max / 448)) as spec 2.3 writes the scale."""
    rows = hard_rows(512).cpu()
    blocks = rows[:, ROPE:].reshape(-1, 7, 64)
    scale = torch.exp2(torch.ceil(torch.log2(blocks.abs().amax(2, keepdim=True).double().clamp(min=1e-4) / 448)))
    codes = (blocks.double() / scale).float().to(torch.float8_e4m3fn).view(torch.uint8).reshape(-1, 448)
    turned = rows[:, :ROPE].to(torch.bfloat16).view(torch.uint8)
    scales = scale.float().to(torch.float8_e8m0fnu).view(torch.uint8).reshape(-1, 7)
    want = torch.cat([codes, turned, scales], dim=1).numpy()
    assert np.array_equal(written(pack_rows(hard_rows(512), ROPE).cpu().numpy(), 512), written(want, 512))


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_packing_what_was_unpacked_changes_nothing(dtype: str) -> None:
    rows = cases.Draws(cases.DTYPES[dtype], np.random.default_rng(0)).tensor(2, 3, 512)
    packed = pack_rows(rows, ROPE)
    values = naive_unpack(packed.cpu().numpy(), 512, ROPE)
    again = pack_rows(torch.from_numpy(values).to(rows), ROPE)
    assert packed.shape == (2, 3, 584) and np.array_equal(cases.f64(again[..., :583]), cases.f64(packed[..., :583]))
    assert np.abs(values - cases.f64(rows)).max() <= np.abs(cases.f64(rows)).max() * 2**-4


def packed_case(kind: str, dtype: str, lengths: list[int], nodes: list[int], shape: str = "tree", heads: int = 4,
                dim: int = 128, seed: int = 0):  # fmt: skip
    """Operands whose keys are packed rows, 61 different ones at random places, and the same operands unpacked. Rows that no table or mask
    names, and the padding of all rows, are bytes of 255.
    """
    real, operands = inputs(kind, heads, dim, ROPE, dtype, lengths, nodes, shape, seed)
    rng = np.random.default_rng(seed)
    bank = pack_rows(cases.Draws(cases.DTYPES[dtype], rng).tensor(61, dim), ROPE)
    packed, plain = list(operands), list(operands)
    for i in KEYS:
        packed[i] = bank[cases.to_torch(rng.integers(0, 61, operands[i].shape[:-1]))]
        packed[i][(operands[i] == 0).all(-1)] = 0
        packed[i][..., dim + ROPE + (dim - ROPE) // 64 :] = 255
        packed[i][operands[i].isnan().any(-1)] = 255
        plain[i] = naive_unpack(packed[i].cpu().numpy(), dim, ROPE)
    return real, packed, plain


def check(kind: str, dtype: str, lengths: list[int], nodes: list[int], *, dim: int = 128, tiles: dict[str, int] | None = None,
          **options) -> None:  # fmt: skip
    real, packed, plain = packed_case(kind, dtype, lengths, nodes, dim=dim, **options)
    got = run(packed, dim**-0.5, **(tiles or {}))
    want = naive_tree_attention(*[cases.f64(x) if isinstance(x, torch.Tensor) else x for x in plain], dim**-0.5)
    assert cases.relative_error(got[real], want[real.cpu().numpy()]) <= cases.TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("kind", ["swa", "csa", "hca"])
def test_trees_at_page_and_window_boundaries(kind: str, dtype: str) -> None:
    check(kind, dtype, [0, 5, 126, 129, 255, 258], [6, 1, 5, 6, 4, 6])


@pytest.mark.parametrize("phase", range(4))
def test_phases_split(phase: int) -> None:
    check("csa", "fp32", [124 + phase, 256 + phase], [6, 6], seed=phase, tiles={"splits": 3})
    check("hca", "fp32", [124 + phase, 256 + phase], [6, 6], seed=phase, tiles={"splits": 3})


def test_one_node_and_64_nodes() -> None:
    check("swa", "fp32", [0], [1])
    check("csa", "fp32", [200], [1])
    check("csa", "bf16", [70], [64], tiles={"block_k": 64})
    check("hca", "fp32", [120], [64], shape="chain", tiles={"block_k": 64})


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_full_width(dtype: str) -> None:
    check("csa", dtype, [9], [3], heads=64, dim=512, tiles={"block_m": 64, "splits": 2})


def test_packed_masks() -> None:
    """With packed keys too, four integers a node say the same as both additive masks."""
    real, packed, _ = packed_case("csa", "bf16", [0, 126, 250], [6, 9, 5])
    want = run(packed, 0.125)
    packed[4] = packed[8] = pack_masks(packed[4], packed[8], packed[2].shape[1], packed[6].shape[1])
    assert torch.equal(run(packed, 0.125)[real], want[real])


def test_commit_moves_bytes() -> None:
    """Accepted rows arrive bit for bit, and every byte of the other rows stays."""
    sizes, step, feeds = commit_case(3, [3, 126], [9, 12])
    rows = cases.Draws(torch.bfloat16, np.random.default_rng(1)).tensor(4, step.positions.size, 512)
    scratch = pack_rows(rows, ROPE)
    unused = np.setdiff1d(np.arange(step.positions.size), feeds["accepted"])
    scratch[:, cases.to_torch(unused)] = 255
    pool = torch.full((4 * sizes.window_rows, 584), 254, dtype=torch.uint8, device=cases.DEVICE)
    want = naive_scatter_rows(scratch.cpu().numpy(), feeds["accepted"], pool.cpu().numpy(), feeds["window_dst"])
    scatter_rows(scratch, cases.to_torch(feeds["accepted"]), pool, cases.to_torch(feeds["window_dst"]))
    assert np.array_equal(pool.cpu().numpy(), want)
    assert not (want == 255).all(axis=1).any() and (want != 254).any()


def test_a_committed_row_is_the_row_of_the_tree() -> None:
    """The last node of a chain sees the same whether the others are nodes or were committed to the window."""
    _, operands, _ = packed_case("swa", "fp32", [0], [6], shape="chain")
    whole = run(operands, 0.125)[:, 5:]
    q, _, _, nodes, _, *far, sink, cos, sin = operands
    window = torch.full((8, nodes.shape[-1]), 255, dtype=torch.uint8, device=cases.DEVICE)
    window[0] = 0
    picks = [cases.to_torch(np.arange(n)) for n in (5, 6)]
    scatter_rows(nodes, picks[0], window, picks[0] + 1)
    mask, last = np.zeros((1, 1, 7), np.float32), (x[:, 5:].contiguous() for x in (q, nodes, cos, sin))
    q, nodes, cos, sin = last
    far[3] = far[3][:, 5:]
    after = run([q, window, picks[1][None], nodes, mask, *far, sink, cos, sin], 0.125)
    assert cases.relative_error(after, cases.f64(whole)) <= 1e-6


@pytest.mark.parametrize("name", ["flash", "pro"])
def test_bytes_of_the_pools_are_the_closed_formulas(name: str) -> None:
    """Bytes of the tensors that kernels read and commits write, per token and per sequence, where nothing is selected (spec 7.1)."""
    config = published(name)
    sizes = EngineSizes.make(config, max_batch_size=2, max_seq_len=2048, max_verify_tokens=16)
    assert not sizes.sparse
    width = pack_rows(torch.zeros(1, config.head_dim, device=cases.DEVICE), config.rope_head_dim).nbytes
    held = state_bytes(config, sizes, FP8)
    page = sizes.page_tokens * held.per_token
    assert width * (sizes.num_csa * sizes.page_tokens // 4 + sizes.num_hca * sizes.page_tokens // 128) == page
    layers = sizes.num_layers + sizes.has_mtp
    assert width * layers * (sizes.window_rows - 1) == sizes.num_slots * window_bytes(config, sizes, FP8)
    assert (held.per_csa_boundary, held.per_hca_boundary) == (width * sizes.num_csa, width * sizes.num_hca)


def test_row_bytes_are_those_of_the_accounting() -> None:
    config = published("flash")
    assert row_bytes(512, 64) == FP8.row(config) == 584
    for dim, rope in ((128, 64), (256, 64), (256, 128), (1024, 64)):
        small = dataclasses.replace(config, head_dim=dim, rope_head_dim=rope)
        assert row_bytes(dim, rope) == CacheFormat("", 2, 8, packed=True).row(small)
