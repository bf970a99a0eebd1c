"""Calibration against known chances, accepted lengths against counts, costs against a machine that differs from its table."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from scipy.optimize import minimize

from trtllm_v4tree.errors import EngineFormatError
from trtllm_v4tree.runtime import calibration as module
from trtllm_v4tree.runtime.calibration import Calibration, CandidateShape, features, fit, logit
from trtllm_v4tree.runtime.costs import PLAIN, Arm, Costs, bucket
from trtllm_v4tree.runtime.latency import LatencyTable
from trtllm_v4tree.runtime.policies.lengths import Lengths
from trtllm_v4tree.runtime.policies.rules import node_chances, path_scores
from trtllm_v4tree.runtime.tree import select_nodes

from .test_policy_rules import random_round, usual

TRUE = np.array([1.0, 0.6, -0.5, 0.9, -0.2, -0.7, -0.3, -0.4])


def chances(local: np.ndarray, shape: CandidateShape) -> np.ndarray:
    """What TRUE makes of drafter probabilities, written out."""
    p = np.exp(local)
    x = np.log(p / (1 - p))
    z = np.empty_like(x)
    for c, (depth, rank) in enumerate(zip(shape.depth, shape.rank, strict=True)):
        own = TRUE[0] + TRUE[1] * x[:, c] + TRUE[7] * x[:, min(c + 1, x.shape[1] - 1)]
        later = TRUE[2] + TRUE[3] * x[:, c] + TRUE[4] * x[:, c - rank] + TRUE[5] * np.log(1 + rank)
        z[:, c] = (own if rank == 0 else later) + TRUE[6] * np.log(depth)
    return 1 / (1 + np.exp(-z))


def test_candidate_shape_follows_the_draft_round() -> None:
    shape = CandidateShape.of(3, 2)
    assert shape.depth.tolist() == [1, 1, 2, 2, 2, 2, 3, 3, 3, 3]
    assert shape.rank.tolist() == [0, 1, 0, 1, 0, 1, 0, 1, 0, 1]
    assert shape.rival.tolist() == [1, 0, 3, 2, 5, 4, 7, 6, 9, 8]
    assert CandidateShape.of(1, 3).rival.tolist() == [1, 0, 0]
    assert np.exp(CandidateShape.of(2, 1).rivals(np.log([[0.5, 0.9]]))) == pytest.approx(np.array([[0.15, 0.03]]))


@pytest.mark.parametrize("only_sure", [False, True])
def test_chances_are_learnt_whatever_was_chosen_for_verifying(only_sure: bool) -> None:
    rng, calibration, shape = np.random.default_rng(1), Calibration(), CandidateShape.of(2, 2)
    drafts = -rng.exponential(1.2, (1500, 6)) - 0.02
    truth = chances(drafts, shape)
    for local, chance in zip(drafts, truth, strict=True):
        seen = [c for c in range(6) if not only_sure or local[c] > np.log(0.3) or rng.random() < 0.1]
        calibration.update(local[None], shape, [0] * len(seen), seen, (rng.random(len(seen)) < chance[seen]).tolist())
    got = np.exp(calibration.scores(drafts, shape))
    assert np.abs(got - np.minimum(truth, 0.98)).mean() < 0.03
    assert np.abs(np.exp(drafts) - truth).mean() > 0.1


def test_the_fit_is_the_most_probable_one() -> None:
    rng = np.random.default_rng(2)
    rank, depth = rng.integers(0, 3, 400), rng.integers(1, 5, 400)
    inputs = features(-rng.exponential(1.0, 400), -rng.exponential(1.0, 400), rank, depth)
    hits = (rng.random(400) < 0.4).astype(float)

    def loss(w: np.ndarray) -> float:
        z = inputs @ w
        prior = module.PRECISION / 2 * np.sum((w - module.PRIOR) ** 2)
        return float(np.sum(np.logaddexp(0, z) - hits * z) + prior)

    weights = module.PRIOR
    for _ in range(10):
        weights = fit(inputs, hits, weights)
    np.testing.assert_allclose(weights, minimize(loss, module.PRIOR, method="BFGS").x, atol=1e-3)


def test_one_sided_or_extreme_observations_keep_it_finite() -> None:
    calibration, shape = Calibration(), CandidateShape.of(3, 2)
    local = np.array([[-1e-9, -60.0, -1e-9, -60.0, -1e-9, -60.0, -1e-9, -60.0, -1e-9, -60.0]])
    for _ in range(400):
        calibration.update(local, shape, [0] * 3, [0, 1, 2], [True, False, True])
    scores = calibration.scores(local, shape)
    assert np.isfinite(scores).all() and (scores <= np.log(0.98)).all()
    assert np.isfinite(logit(np.array([0.0, -np.inf, -1e300]))).all()


def test_calibrated_selection_is_closed_under_ancestors() -> None:
    rng, calibration, shape = np.random.default_rng(3), Calibration(), (3, 3)
    calibration.weights = rng.normal(size=8)
    drafted = random_round(rng, shape)
    scores = path_scores(drafted.parents, calibration.scores(drafted.scores, CandidateShape.of(*shape)), shape)
    for budget in range(1, 20):
        chosen = select_nodes(scores, drafted.parents, drafted.tokens, np.array([budget]), [0])
        assert min(chosen.parents[0]) >= -1 and len(set(chosen.candidates[0])) == budget


# ---------------------------------------------------------------- lengths

NESTED = ((1, 1), (3, 1), (2, 2), (4, 2))


def looked(rounds: int, shape: tuple[int, int], chance: float) -> Lengths:
    """After looks at rounds in which every candidate is accepted with a share of the drafter's probability."""
    lengths, rng = Lengths(NESTED, 6, usual(NESTED)), np.random.default_rng(4)
    for _ in range(rounds):
        drafted = random_round(rng, shape, batch=4)
        lengths.look(drafted, np.exp(drafted.scores) * chance, shape)
    return lengths


def test_a_look_tells_of_every_smaller_draft_round() -> None:
    """Against trees selected node by node from what each smaller round would have drafted."""
    rng, shape = np.random.default_rng(5), (4, 2)
    drafted = random_round(rng, shape, batch=3)
    p = np.exp(drafted.scores) * rng.random(drafted.scores.shape)
    places, chances = CandidateShape.of(*shape), node_chances(drafted, p, shape, NESTED, 6)
    for row, (steps, topk) in zip(chances, NESTED, strict=True):
        expected = np.zeros(6)
        expected[0] = 1.0
        for b, up in enumerate(drafted.parents.tolist()):
            inside = []
            for c, parent in enumerate(up):
                here = places.depth[c] <= steps and places.rank[c] < topk
                inside.append(bool(here and (parent < 0 or inside[parent])))
            best = sorted((c for c in range(len(up)) if inside[c]), key=lambda c: -drafted.scores[b, c])[:5]
            for place, c in enumerate(best, 1):
                expected[place] += p[b, c] / 3
        np.testing.assert_allclose(row, expected)


def test_lengths_follow_the_looks_and_draft_rounds_not_looked_at_move_along() -> None:
    good, bad = looked(60, (2, 2), 0.95).curves(), looked(60, (2, 2), 0.3).curves()
    before = Lengths(NESTED, 6, usual(NESTED)).curves()
    assert (bad[:, 1:][before[:, 1:] > 0] < good[:, 1:][before[:, 1:] > 0]).all()
    assert bad[3, 4] < 0.8 * before[3, 4]
    assert (before[0, 2:] == 0).all() and before[0, 1] == pytest.approx(1.6)


def test_what_is_accepted_corrects_all_arms_lately_and_one_arm_for_long() -> None:
    lengths, arm = looked(60, (4, 2), 0.9), Arm((4, 2), 5)
    before = lengths.curves()
    for _ in range(400):
        lengths.see(arm, [2, 0, 0, 0])
    after = lengths.curves()
    assert after[3, 4] == pytest.approx(1.5, abs=0.05)
    assert after[1, 3] < before[1, 3]
    lengths.forget(1.0)
    forgotten = lengths.curves()
    assert forgotten[1, 3] == pytest.approx(before[1, 3])
    assert forgotten[3, 4] < before[3, 4]


def test_a_long_chain_tells_what_a_shorter_one_brings() -> None:
    """Accepted lengths that the model has wrong at every depth: one token or four, never two or three."""
    shapes = ((1, 1), (3, 1), (4, 1), (4, 2))
    lengths, rng = Lengths(shapes, 6, usual(shapes)), np.random.default_rng(6)
    accepted = np.where(rng.random(4000) < 0.5, 4, 1)
    for part in accepted.reshape(-1, 20):
        lengths.see(Arm((4, 1), 5), part.tolist())
    curves = lengths.curves()
    assert curves[2, 4] == pytest.approx(1 + accepted.mean(), abs=0.1)
    assert curves[1, 3] == pytest.approx(1 + np.minimum(accepted, 3).mean(), abs=0.1)
    assert curves[0, 1] == pytest.approx(2.0, abs=0.05)


# ---------------------------------------------------------------- costs


def table() -> LatencyTable:
    target = {(b, n): b**0.5 * (1 + 0.1 * (n - 1)) for b in (1, 4) for n in (1, 2, 4, 8)}
    return LatencyTable(
        target, {(s, 1, b): 0.2 * s * b for s in (1, 3) for b in (1, 4)}, {1: 0.1, 4: 0.3}, usual(((1, 1), (3, 1)))
    )


def test_table_is_read_between_and_beyond_what_was_measured() -> None:
    t = table()
    assert t.target_ms(1, 3) == pytest.approx(1.2)
    assert t.target_ms(2, 1) == pytest.approx(1 + 1 / 3)
    assert t.target_ms(8, 1) == pytest.approx(4.0)
    assert t.target_ms(1, 16) == pytest.approx(3.4)
    assert t.draft_ms(3, 1, 2) == pytest.approx(0.6 + 1.8 / 3)
    assert t.overhead_ms(4) == 0.3 and t.overhead_ms(8) == pytest.approx(0.6)
    curve = t.target_curve(3, 8)
    np.testing.assert_allclose(curve, [t.target_ms(3, n) for n in range(1, 9)])
    with pytest.raises(ValueError, match="read-only"):
        curve[0] = 0.0


def test_table_round_trip_and_damage(tmp_path) -> None:  # type: ignore[no-untyped-def]
    made, path = table(), tmp_path / "latency.json"
    path.write_text(made.to_json())
    read = LatencyTable.read(path)
    assert dataclasses.astuple(read) == dataclasses.astuple(made)
    path.write_text('{"target": [[1]]}')
    with pytest.raises(EngineFormatError, match="latency table"):
        LatencyTable.read(path)


def test_costs_follow_the_machine() -> None:
    """Drafting takes twice what the table says, one draft round more; the machine's speed drifts, and hiccups are not believed."""
    rng, costs, arms = np.random.default_rng(0), Costs(table(), ((1, 1), (3, 1)), 8), (Arm((1, 1), 2), Arm((3, 1), 4))

    def truth(arm: Arm) -> float:
        assert arm.shape is not None
        factor = 2.0 if arm.shape == (1, 1) else 2.6
        return factor * (table().draft_ms(*arm.shape, 4) + table().target_ms(4, arm.nodes) + 0.3)

    for number in range(160):
        speed = 1 + 0.5 * np.sin(number / 25)
        for arm, ms in [(PLAIN, 2.3), (PLAIN, 2.3), (PLAIN, 2.3), *((arm, truth(arm)) for arm in arms)]:
            times = ms * speed * rng.normal(1, 0.05, 5)
            times[0] *= 20 if number == 100 else 1
            costs.saw(4, arm, times.tolist())
        costs.age()
    rounds = costs.rounds_ms(4) / costs.plain_ms(4)
    assert rounds[0, 1] == pytest.approx(truth(arms[0]) / 2.3, rel=0.1)
    assert rounds[1, 3] == pytest.approx(truth(arms[1]) / 2.3, rel=0.1)
    elsewhere, unseen = (c.rounds_ms(1)[0, 1] / c.plain_ms(1) for c in (costs, Costs(table(), ((1, 1), (3, 1)), 8)))
    assert unseen == pytest.approx((0.2 + 1.1 + 0.1) / 1.1)
    assert elsewhere == pytest.approx(2.0 * unseen, rel=0.1)


def test_a_machine_that_slows_down_does_not_change_what_arms_cost_each_other() -> None:
    costs, arm = Costs(table(), ((1, 1), (3, 1)), 8), Arm((3, 1), 4)
    for speed in [1.0] * 20 + [3.0] * 20:
        costs.saw(1, PLAIN, [1.1 * speed] * 32)
        before = costs.rounds_ms(1)[1, 3] / costs.plain_ms(1)
    assert before == pytest.approx(2.0 / 1.1)
    assert costs.plain_ms(1) == pytest.approx(3.3, rel=0.01)
    doubts = costs.doubts(1)[1, 3]
    costs.saw(1, arm, [2.0 * 3.0] * 8)
    assert costs.doubts(1)[1, 3] < doubts


def test_batches_share_buckets() -> None:
    assert [bucket(b) for b in (1, 2, 3, 4, 5, 8, 9, 16)] == [0, 1, 2, 2, 3, 3, 4, 4]
