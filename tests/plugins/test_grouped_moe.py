"""Grouped experts against a float64 loop over tokens and experts: routings, sizes, unowned memory NaN, bits beside any batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from v4tree_plugins import grouped_moe as moe

from tests.plugins import cases

LIMIT, SCALE = 1.5, 2.5
"""The limit is reached by many of the products of these cases; the factor of experts in FP4."""
WIDTHS = [(64, 32), (200, 72), (256, 160), (33, 17)]
"""(hidden, inner): powers of two, multiples of neither block, v4-nano's, and odd."""


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """Fresh memory is NaN, and its integers are the largest."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(1).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def routing(kind: str, tokens: int, topk: int, experts: int, rng: np.random.Generator) -> np.ndarray:
    """Different experts of each token [T, k]: any of them, the last k for all tokens, or only even ones."""
    if kind == "same":
        return np.tile(np.arange(experts - topk, experts), (tokens, 1))
    ids = np.argsort(rng.random((tokens, experts)), axis=1)
    if kind == "even":
        ids = np.argsort(rng.random((tokens, experts // 2)), axis=1) * 2
    return np.ascontiguousarray(ids[:, :topk])


@dataclass
class Case:
    """Operands of a layer; the weights of experts that nobody chose are NaN."""

    x: torch.Tensor
    base: torch.Tensor
    ids: np.ndarray
    weights: torch.Tensor
    fc1: torch.Tensor
    fc2: torch.Tensor
    scales: tuple[torch.Tensor, torch.Tensor] | None = None
    """Of experts in FP4."""

    @classmethod
    def fp4(cls, dtype: str, ids: np.ndarray, experts: int, widths: tuple[int, int], seed: int = 0) -> Case:
        """With random codes and scales of about the size of a weight; those of experts that nobody chose are no numbers."""
        case, rng = cls.make(dtype, ids, experts, widths, seed), np.random.default_rng(seed)
        packed, scales = [], []
        for weight in (case.fc1, case.fc2):
            *rows, inputs = weight.shape
            near = int(127 - np.log2(3 * inputs**0.5))
            packed.append(cases.to_torch(rng.integers(0, 256, (*rows, inputs // 2), dtype=np.uint8)))
            scales.append(cases.to_torch(rng.integers(near - 1, near + 2, (*rows, inputs // 32), dtype=np.uint8)))
            scales[-1][cases.to_torch(np.setdiff1d(np.arange(experts), ids))] = 255
        return replace(case, fc1=packed[0], fc2=packed[1], scales=(scales[0], scales[1]))

    @classmethod
    def make(cls, dtype: str, ids: np.ndarray, experts: int, widths: tuple[int, int], seed: int = 0) -> Case:
        (tokens, topk), (hidden, inner) = ids.shape, widths
        draw = cases.Draws(cases.DTYPES[dtype], np.random.default_rng(seed))
        fc1 = draw.tensor(experts, 2 * inner, hidden, scale=2 * hidden**-0.5)
        fc2 = draw.tensor(experts, hidden, inner, scale=inner**-0.5)
        idle = cases.to_torch(np.setdiff1d(np.arange(experts), ids))
        fc1[idle], fc2[idle] = float("nan"), float("nan")
        weights = cases.to_torch(draw.rng.uniform(0.1, 2, (tokens, topk)).astype(np.float32))
        return cls(draw.tensor(tokens, hidden), draw.tensor(tokens, hidden), ids, weights, fc1, fc2)

    def run(self, rows: np.ndarray | None = None, **options: int) -> torch.Tensor:
        """Of all tokens, or of those that `rows` names in its order."""
        keep = np.arange(len(self.ids)) if rows is None else rows
        at, ids = cases.to_torch(keep), cases.to_torch(self.ids[keep])
        inputs = (self.x[at], self.base[at], ids, self.weights[at], self.fc1, self.fc2)
        if self.scales is not None:
            return moe.grouped_moe(*inputs, limit=LIMIT, scales=self.scales, scale=SCALE, **options)
        return moe.grouped_moe(*inputs, limit=LIMIT, **options)

    def error(self, **options: int) -> float:
        x, base, weights = map(cases.f64, (self.x, self.base, self.weights))
        fc1, fc2 = map(cases.f64, (self.fc1, self.fc2))
        if self.scales is not None:
            pairs = zip((self.fc1, self.fc2), self.scales, strict=True)
            fc1, fc2 = (moe.naive_fp4(packed.cpu().numpy(), scale.cpu().numpy()) for packed, scale in pairs)
            fc2 = SCALE * fc2
        return cases.relative_error(
            self.run(**options), moe.naive_grouped_moe(x, base, self.ids, weights, fc1, fc2, LIMIT)
        )


def any_case(dtype: str, tokens: int, topk: int, experts: int, widths: tuple[int, int], kind: str = "any") -> Case:
    return Case.make(dtype, routing(kind, tokens, topk, experts, np.random.default_rng(tokens)), experts, widths)


@pytest.mark.parametrize("kind", ["any", "same", "even"])
@pytest.mark.parametrize(("tokens", "topk", "experts"), [(1, 6, 256), (1, 1, 1), (17, 2, 8), (64, 3, 8), (200, 6, 12)])
def test_lines(tokens: int, topk: int, experts: int, kind: str) -> None:
    """Every pair once, on a line of its expert, and as few lines as the experts need."""
    if kind == "even" and topk > experts // 2:
        return
    ids = routing(kind, tokens, topk, experts, np.random.default_rng(tokens))
    table = moe.align(cases.to_torch(ids), experts).cpu().numpy()
    assert np.array_equal(table, moe.naive_align(ids, experts))
    used = table[table[:, 0] >= 0]
    pairs = used[:, 1:][used[:, 1:] >= 0]
    assert np.array_equal(np.sort(pairs), np.arange(tokens * topk))
    assert len(used) == sum(-(-count // moe.BLOCK_M) for count in np.bincount(ids.ravel()))


def test_more_pairs_than_are_sorted_at_a_time() -> None:
    ids = routing("any", 400, 6, 7, np.random.default_rng(1))
    assert ids.size > 2 * moe.CHUNK
    assert np.array_equal(moe.align(cases.to_torch(ids), 7).cpu().numpy(), moe.naive_align(ids, 7))


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("tokens", [1, 21])
def test_sizes(tokens: int, widths: tuple[int, int], dtype: str) -> None:
    assert any_case(dtype, tokens, 2, 8, widths).error() <= cases.TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("kind", ["same", "even"])
@pytest.mark.parametrize("tokens", [1, 64])
def test_routings(tokens: int, kind: str, dtype: str) -> None:
    """All tokens to the same experts, and half of the experts without a token."""
    assert any_case(dtype, tokens, 3, 8, (96, 48), kind).error() <= cases.TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_256_experts(dtype: str) -> None:
    """One token, whose 6 experts alone are read, and the nodes of a tree."""
    for tokens in (1, 8):
        assert any_case(dtype, tokens, 6, 256, (64, 32)).error() <= cases.TOLERANCE[dtype]


@pytest.mark.parametrize("block", [{"block_n": 32, "block_k": 128}, {"block_n": 16, "block_k": 32}])
def test_other_tiles(block: dict[str, int]) -> None:
    assert any_case("fp32", 20, 2, 4, (200, 72)).error(**block) <= cases.TOLERANCE["fp32"]


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_a_tokens_bits_do_not_depend_on_the_others(dtype: str) -> None:
    """Alone, in a part, in another order and beside tokens that are NaN."""
    check_bits(any_case(dtype, 24, 3, 6, (200, 40)))


def check_bits(case: Case) -> None:
    whole, order = case.run(), np.random.default_rng(3).permutation(24)
    for rows in (order, order[:5], order[5:6], np.arange(17)):
        assert torch.equal(case.run(rows), whole[cases.to_torch(rows)])
    case.x[::2] = float("nan")
    assert torch.equal(case.run()[1::2], whole[1::2]) and case.run()[::2].isnan().all()


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("widths", [(64, 32), (256, 160), (320, 96)])
@pytest.mark.parametrize(("tokens", "kind"), [(1, "any"), (33, "any"), (64, "same"), (21, "even")])
def test_experts_in_fp4(tokens: int, kind: str, widths: tuple[int, int], dtype: str) -> None:
    """Inputs of a tile's multiple and not."""
    ids = routing(kind, tokens, 3, 8, np.random.default_rng(tokens))
    assert Case.fp4(dtype, ids, 8, widths).error(block_k=128) <= cases.TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_bits_with_experts_in_fp4(dtype: str) -> None:
    check_bits(Case.fp4(dtype, routing("any", 24, 3, 6, np.random.default_rng(0)), 6, (160, 64)))


@pytest.mark.parametrize(("dtype", "byte"), [("bf16", 2), ("bf16", 122), ("bf16", 252), ("fp16", 104), ("fp16", 140)])
def test_every_code_of_fp4(dtype: str, byte: int) -> None:
    """One token of ones and one expert whose every output row holds one code 32 times, with the least and the largest scale that
    the loader lets pass; gate 1 and up 1.5 of the first inner row, zeros of the others."""
    ones, ids = torch.ones(1, 32, dtype=cases.DTYPES[dtype], device=cases.DEVICE), torch.zeros(1, 1, dtype=torch.int64)
    codes = torch.arange(16, dtype=torch.uint8).repeat_interleave(2)
    fc2 = (codes * 17)[None, :, None].repeat(1, 1, 16).to(cases.DEVICE)
    fc1 = torch.zeros((1, 64, 16), dtype=torch.uint8, device=cases.DEVICE)
    fc1[0, 0], fc1[0, 1] = 0x22, 0x33
    scales = tuple(torch.full((1, n, 1), b, dtype=torch.uint8, device=cases.DEVICE) for n, b in ((64, 122), (32, byte)))
    options = {"limit": 10.0, "scales": scales, "scale": 2.0 ** (127 - byte)}
    weights = torch.ones(1, 1, device=cases.DEVICE)
    got = moe.grouped_moe(ones, 0 * ones, ids.to(cases.DEVICE), weights, fc1, fc2, **options)
    inner = cases.f64(torch.tensor(1.5 / (1 + np.exp(-1))).to(ones.dtype))
    unit = {"bf16": 2**-8, "fp16": 2**-11}[dtype]
    assert np.allclose(cases.f64(got)[0], moe.E2M1[codes.numpy()] * inner, rtol=unit)


def test_the_limit_is_one_sided_for_the_gate() -> None:
    """Gate and up rows of one input and one inner column, fc2 of 1."""
    x = torch.tensor([[1.0], [-1.0]], device=cases.DEVICE)
    ids, ones = torch.zeros(2, 1, dtype=torch.int64, device=cases.DEVICE), torch.ones(2, 1, device=cases.DEVICE)
    fc1, fc2 = torch.tensor([[[30.0], [-20.0]]], device=cases.DEVICE), torch.ones(1, 1, 1, device=cases.DEVICE)
    got = cases.f64(moe.grouped_moe(x, 0 * x, ids, ones, fc1, fc2, limit=10.0))[:, 0]
    assert np.allclose(got, [10 / (1 + np.exp(-10)) * -10, -30 / (1 + np.exp(30)) * 10], rtol=1e-5)


def test_what_is_no_number_stays_none() -> None:
    """A clamp must not hide it."""
    case = any_case("fp32", 2, 2, 4, (32, 16))
    case.fc1[case.ids[0, 0]] = float("nan")
    assert case.run()[0].isnan().all()
