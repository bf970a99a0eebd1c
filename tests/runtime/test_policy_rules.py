"""The decisions of policies against brute force over every subtree, and the names that lead to them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_v4tree.errors import RequestError
from trtllm_v4tree.runtime.calibration import CandidateShape
from trtllm_v4tree.runtime.latency import LatencyTable
from trtllm_v4tree.runtime.policies import rules
from trtllm_v4tree.runtime.policies.base import Candidates, Shape, candidates_of
from trtllm_v4tree.runtime.policies.judge import met
from trtllm_v4tree.runtime.policies.names import ADAPTIVE, make_policy, parse_adaptive
from trtllm_v4tree.runtime.tree import select_nodes

TINY = ((1, 3), (2, 2), (3, 1), (2, 1))


def usual(shapes: Iterable[Shape]) -> dict[Shape, list[float]]:
    """Chances of the root and of the best nodes of draft rounds: 0.6 at the first level, less below and for later ranks."""
    nodes = {
        (steps, topk): [0.6**d * 0.25**r for d in range(1, steps + 1) for r in range(topk if d == 1 else topk**2)]
        for steps, topk in shapes
    }
    return {shape: [1.0, *sorted(own, reverse=True)] for shape, own in nodes.items()}


def random_round(rng: np.random.Generator, shape: Shape, batch: int = 1) -> Candidates:
    """Candidates as a draft round proposes them: children of the K best of the level above, siblings in falling order."""
    steps, topk = shape
    parents = np.full((batch, candidates_of(shape)), -1)
    scores = np.zeros(parents.shape)
    for b in range(batch):
        frontier, first = [-1], 0
        for _ in range(steps):
            for place, parent in enumerate(frontier):
                at = slice(first + place * topk, first + (place + 1) * topk)
                local = np.log(broken_stick(rng)[:topk])
                parents[b, at] = parent
                scores[b, at] = local + (scores[b, parent] if parent >= 0 else 0.0)
            level = np.arange(first, first + topk * len(frontier))
            first += len(level)
            frontier = level[np.argsort(-scores[b, level], kind="stable")[:topk]].tolist()
    return Candidates(parents, rng.integers(0, 50, parents.shape), scores)


def broken_stick(rng: np.random.Generator) -> np.ndarray:
    """Probabilities of the five most likely tokens, in falling order."""
    left = np.cumprod(1 - rng.uniform(0.2, 0.95, 6))
    return np.sort(np.concatenate([[1.0], left[:4]]) - left[:5])[::-1]


def subtrees(parents: list[int]) -> Iterator[tuple[int, ...]]:
    """Every set of candidates that holds the parent of each of its members."""
    for size in range(len(parents) + 1):
        for chosen in itertools.combinations(range(len(parents)), size):
            if all(parents[c] < 0 or parents[c] in chosen for c in chosen):
                yield chosen


def costs(rng: np.random.Generator, count: int) -> np.ndarray:
    """Rising costs of passes over 1, 2, .. nodes."""
    return 1 + np.cumsum(rng.random(count) * rng.choice([0.02, 0.3, 1.0]))


@pytest.mark.parametrize("shape", TINY)
@pytest.mark.parametrize("seed", range(12))
def test_best_first_takes_the_subtree_with_the_most_tokens_per_millisecond(shape: Shape, seed: int) -> None:
    rng = np.random.default_rng(seed)
    drafted = random_round(rng, shape)
    p, verify, fixed = np.exp(drafted.scores), costs(rng, candidates_of(shape) + 1), rng.random()
    found = rules.best_rate(rules.expected_tokens(p, 64), verify, fixed)

    def rate(chosen: tuple[int, ...]) -> float:
        return float((1 + p[0, list(chosen)].sum()) / (fixed + verify[len(chosen)]))

    best = max(map(rate, subtrees(drafted.parents[0].tolist())))
    picked = select_nodes(drafted.scores, drafted.parents, drafted.tokens, np.array([found]), [0]).candidates[0]
    assert rate(tuple(c for c in picked if c >= 0)) == pytest.approx(best)


@pytest.mark.parametrize("shape", [(2, 1), (1, 3), (3, 1)])
@pytest.mark.parametrize("seed", range(12))
def test_a_shared_budget_goes_to_the_best_nodes_of_all_sequences(shape: Shape, seed: int) -> None:
    rng = np.random.default_rng(seed)
    drafted = random_round(rng, shape, batch=3)
    p, verify, fixed = np.exp(drafted.scores), costs(rng, candidates_of(shape) + 1), rng.random()
    budgets = rules.shared_budgets(p, verify, fixed)

    def rate(trees: tuple[tuple[int, ...], ...]) -> float:
        nodes = 1 + sum(map(len, trees)) / 3
        tokens = sum(1 + p[b, list(tree)].sum() for b, tree in enumerate(trees))
        return float(tokens / (fixed + np.interp(nodes, np.arange(1, len(verify) + 1), verify)))

    best = max(map(rate, itertools.product(*(subtrees(up.tolist()) for up in drafted.parents))))
    chosen = select_nodes(drafted.scores, drafted.parents, drafted.tokens, budgets, [0] * 3).candidates
    assert rate(tuple(tuple(c for c in row if c >= 0) for row in chosen)) == pytest.approx(best)


@pytest.mark.parametrize("shape", [(1, 1), (3, 2), (4, 3), (5, 1)])
def test_local_and_path_scores_are_inverse(shape: Shape) -> None:
    drafted = random_round(np.random.default_rng(2), shape, batch=3)
    local = rules.local_scores(drafted)
    for b, up in enumerate(drafted.parents):
        for c, parent in enumerate(up):
            assert local[b, c] == pytest.approx(
                drafted.scores[b, c] - (drafted.scores[b, parent] if parent >= 0 else 0)
            )
    np.testing.assert_allclose(rules.path_scores(drafted.parents, local, shape), drafted.scores)


def test_entropy_counts_what_is_not_among_the_first_as_one_more() -> None:
    even, sure = np.log(np.full((1, 3), 0.25)), np.log([[0.999, 0.0005, 0.0003]])
    assert rules.entropy(even)[0] == pytest.approx(np.log(4))
    assert 0 < rules.entropy(sure)[0] < 0.02


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([(3, 2), (4, 3), (2, 4), (5, 1)]), st.data())
def test_limits_of_depth_and_width_hold_on_every_path(seed: int, shape: Shape, data: st.DataObject) -> None:
    drafted = random_round(np.random.default_rng(seed), shape, batch=2)
    depths = np.array(data.draw(st.lists(st.integers(1, 6), min_size=2, max_size=2)))
    widths = np.array(data.draw(st.lists(st.integers(1, 5), min_size=2, max_size=2)))
    scores, nodes = rules.limited(drafted, shape, depths, widths)
    places = CandidateShape.of(*shape)
    for b, up in enumerate(drafted.parents.tolist()):
        allowed = []
        for c, parent in enumerate(up):
            inside = places.depth[c] <= depths[b] and places.rank[c] < widths[b]
            allowed.append(bool(inside and (parent < 0 or allowed[parent])))
        assert np.isfinite(scores[b]).tolist() == allowed
        assert nodes[b] == 1 + sum(allowed)
    chosen = select_nodes(scores, drafted.parents, drafted.tokens, nodes, [0, 0])
    assert all(min(row[:count]) >= -1 for row, count in zip(chosen.parents, nodes, strict=True))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([(3, 2), (2, 3), (4, 1)]), st.integers(2, 8))
def test_only_children_of_accepted_nodes_are_judged(seed: int, shape: Shape, budget: int) -> None:
    rng = np.random.default_rng(seed)
    drafted = random_round(rng, shape, batch=2)
    chosen = select_nodes(drafted.scores, drafted.parents, drafted.tokens, np.full(2, budget), [0, 0])
    paths = []
    for up in chosen.parents:
        path = [0]
        while (children := [n for n, parent in enumerate(up) if parent == path[-1]]) and rng.random() < 0.7:
            path.append(int(rng.choice(children)))
        paths.append(path)
    seen = list(zip(*met(drafted.parents, chosen.candidates, paths), strict=True))
    expected = [
        (b, chosen.candidates[b][n], n in paths[b])
        for b, up in enumerate(chosen.parents)
        for n, parent in enumerate(up)
        if parent in paths[b]
    ]
    assert seen == expected


# ---------------------------------------------------------------- names

SHAPES = ((1, 1), (3, 2), (4, 1), (3, 3))
SIZES: Any = SimpleNamespace(has_mtp=True, max_verify_tokens=12)
TABLE = LatencyTable({(1, 1): 1.0, (1, 12): 3.0}, {(s, k, 1): 0.1 * s for s, k in SHAPES}, {1: 0.1}, usual(SHAPES))


@pytest.mark.parametrize("name", ADAPTIVE)
def test_every_adaptive_policy_is_made_by_name_with_and_without_a_cap(name: str) -> None:
    whole, capped = (make_policy(n, SIZES, SHAPES, TABLE, {}) for n in (name, f"{name}_d5"))
    assert whole is not None and capped is not None
    assert capped.max_nodes == 5 < whole.max_nodes <= 12
    assert set(whole.shapes) <= set(SHAPES)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fast", "'fast' is unknown: use none, auto, best_first, shared_budget, entropy, recent_length, calibrated"),
        ("auto_d", "is unknown"),
        ("auto_d13", "verifies 13 tokens and the engine at most 12"),
        ("entropy_d1", "d starts at 2"),
        ("s9_k9_d5", "built with s1_k1, s3_k2"),
        ("S3_K2_D6", "is unknown"),
    ],
)
def test_other_names_are_refused_with_what_is_allowed(name: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        make_policy(name, SIZES, SHAPES, TABLE, {})


def test_what_an_engine_lacks_is_named() -> None:
    bare: Any = SimpleNamespace(has_mtp=False, max_verify_tokens=12)
    for name in ADAPTIVE:
        with pytest.raises(RequestError, match="needs a drafter"):
            make_policy(name, bare, (), TABLE, {})
        if ADAPTIVE[name].measured:
            with pytest.raises(RequestError, match="latency table"):
                make_policy(name, SIZES, SHAPES, None, {})
    assert make_policy("none", bare, (), None, {}) is None
    assert parse_adaptive("auto_d6") == ("auto", 6) and parse_adaptive("s3_k2_d6") is None
