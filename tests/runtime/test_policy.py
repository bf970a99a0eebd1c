"""Policies: expected lengths against brute force, calibration against known rates, budgets against the table."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from trtllm_v4tree.errors import EngineFormatError
from trtllm_v4tree.runtime.calibration import Calibration, CandidateShape, expected_lengths
from trtllm_v4tree.runtime.latency import LatencyTable
from trtllm_v4tree.runtime.policy import Candidates, best_budget, best_shape, local_scores, path_scores
from trtllm_v4tree.runtime.tree import select_nodes


def table(per_node: float, per_draft: float) -> LatencyTable:
    nodes, shapes = (1, 2, 4, 8, 16), ((1, 1), (2, 2), (4, 1), (4, 3), (7, 1))
    return LatencyTable(
        {(1, n): 1 + per_node * (n - 1) for n in nodes}, {(s, k, 1): per_draft * s for s, k in shapes}, {1: 0.0}
    )


SHAPES = ((1, 1), (2, 2), (4, 1), (4, 3), (7, 1))


def brute_force_length(rates: np.ndarray, steps: int, topk: int, budget: int) -> float:
    """Best sum of path probabilities over all subtrees, by enumeration of node sets closed under parents."""
    nodes = [p for depth in range(1, steps + 1) for p in itertools.product(range(topk), repeat=depth)]
    value = {p: float(np.prod([rates[d, r] for d, r in enumerate(p)])) for p in nodes}
    best = 0.0
    for chosen in itertools.combinations(nodes, min(budget - 1, len(nodes))):
        inside = set(chosen)
        if all(len(p) == 1 or p[:-1] in inside for p in chosen):
            best = max(best, sum(value[p] for p in chosen))
    return 1 + best


@pytest.mark.parametrize(("steps", "topk", "budget"), [(3, 1, 3), (2, 2, 4), (3, 2, 5), (2, 3, 5)])
def test_expected_lengths_are_those_of_the_best_static_tree(steps: int, topk: int, budget: int) -> None:
    rates = np.sort(np.random.default_rng(0).random((16, 16)), axis=1)[:, ::-1] * 0.9
    assert expected_lengths(rates, steps, topk, budget)[-1] == pytest.approx(
        brute_force_length(rates, steps, topk, budget)
    )


def test_calibration_learns_rates_and_corrects_claims() -> None:
    rng, calibration = np.random.default_rng(1), Calibration()
    truth = np.array([[0.7, 0.15], [0.5, 0.1]])
    for _ in range(6000):
        depth, rank = rng.integers(1, 3, 3), rng.integers(0, 2, 3)
        hit = rng.random(3) < truth[depth - 1, rank]
        calibration.update(depth, rank, np.full(3, 0.3), hit)
    np.testing.assert_allclose(calibration.rates()[:2, :2], truth, atol=0.06)
    shape = CandidateShape.of(2, 2)
    scores = calibration.scores(np.full((1, 6), np.log(0.3)), shape)[0]
    np.testing.assert_allclose(np.exp(scores), truth[shape.depth - 1, shape.rank], atol=0.06)


def test_candidate_shape_follows_the_draft_round() -> None:
    shape = CandidateShape.of(3, 2)
    assert shape.depth.tolist() == [1, 1, 2, 2, 2, 2, 3, 3, 3, 3]
    assert shape.rank.tolist() == [0, 1, 0, 1, 0, 1, 0, 1, 0, 1]


def test_local_and_path_scores_are_inverse() -> None:
    parents = np.array([[-1, -1, 0, 0, 1, 1, 2, 2, 4, 4]])
    scores = np.zeros((1, 10), np.float32)
    local = -np.random.default_rng(2).random(10)
    for c, p in enumerate(parents[0]):
        scores[0, c] = local[c] + (scores[0, p] if p >= 0 else 0)
    candidates = Candidates(parents, np.zeros((1, 10), np.int64), scores)
    np.testing.assert_allclose(local_scores(candidates)[0], local, atol=1e-6)
    np.testing.assert_allclose(path_scores(candidates, local[None]), scores, atol=1e-6)


def test_calibrated_selection_is_closed_under_ancestors() -> None:
    rng = np.random.default_rng(3)
    calibration = Calibration()
    calibration.hits[:] = rng.random((16, 16)) * 500
    calibration.mass[:] = rng.random((16, 16)) * 100
    parents = np.array([[-1, -1, -1, *np.repeat([0, 1, 2], 3), *np.repeat([3, 6, 9], 3)]])
    local = np.log(rng.random((1, 21)))
    candidates = Candidates(parents, np.arange(21)[None], local)
    scores = path_scores(candidates, calibration.scores(local, CandidateShape.of(3, 3)))
    for budget in range(1, 20):
        kept, tree, _ = select_nodes(scores, parents, candidates.tokens, np.array([budget]))
        assert (tree[0] >= -1).all() and len(set(kept[0].tolist())) == budget


def test_free_nodes_are_all_taken_and_dear_ones_are_not() -> None:
    probabilities = np.array([[0.6, 0.3, 0.2, 0.1, 0.05, 0.02]])
    assert best_budget(probabilities, table(0.0, 0.1), (2, 2), 16) == 7
    assert best_budget(probabilities, table(5.0, 0.1), (2, 2), 16) == 1
    middle = best_budget(probabilities, table(0.2, 0.1), (2, 2), 16)
    assert 1 < middle < 7


def test_shape_falls_back_to_plain_where_drafting_does_not_pay() -> None:
    rates = Calibration().rates()
    assert best_shape(SHAPES, rates, table(0.01, 5.0), 1, 16) is None
    assert best_shape(SHAPES, rates, table(0.01, 0.01), 1, 16) in ((4, 3), (7, 1))


def test_latency_table_round_trip_interpolation_and_damage(tmp_path) -> None:  # type: ignore[no-untyped-def]
    made = table(0.1, 0.2)
    path = tmp_path / "latency.json"
    path.write_text(made.to_json())
    read = LatencyTable.read(path)
    assert (read.target, read.draft, read.overhead) == (made.target, made.draft, made.overhead)
    assert read.target_ms(1, 3) == pytest.approx(1.2)
    assert read.target_ms(3, 1) == pytest.approx(3.0)
    path.write_text('{"target": [[1]]}')
    with pytest.raises(EngineFormatError, match="latency table"):
        LatencyTable.read(path)
