"""Calibration against known chances, acceptance rates against counts, costs against a machine that differs from its table."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize

from trtllm_v4tree.errors import EngineFormatError
from trtllm_v4tree.runtime import calibration as module
from trtllm_v4tree.runtime.acceptance import Acceptance
from trtllm_v4tree.runtime.calibration import Calibration, CandidateShape, features, fit, logit
from trtllm_v4tree.runtime.costs import Costs, bucket
from trtllm_v4tree.runtime.latency import LatencyTable
from trtllm_v4tree.runtime.policies.rules import path_scores
from trtllm_v4tree.runtime.tree import select_nodes

from .test_policy_rules import random_round

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


# ---------------------------------------------------------------- acceptance


def feed(acceptance: Acceptance, shape: CandidateShape, rates: np.ndarray, rounds: int, batch: int = 2) -> None:
    """Rounds in which every candidate's parent is reached with the product of first-child rates."""
    above = np.concatenate([[1.0], np.cumprod(rates[:, 0])])
    reached = np.tile(above[shape.depth - 1], (batch, 1))
    for _ in range(rounds):
        acceptance.add(shape, reached, reached * rates[shape.depth - 1, shape.rank])


def test_rates_are_learnt_and_deeper_levels_follow_from_what_is_known() -> None:
    acceptance, rates = Acceptance(4, 2), np.array([[0.7, 0.15], [0.5, 0.1]])
    feed(acceptance, CandidateShape.of(2, 2), rates, 400)
    got = acceptance.rates()
    np.testing.assert_allclose(got[:2], rates, atol=0.03)
    np.testing.assert_allclose(got[2], 0.95 * got[1], atol=0.03)
    assert (np.diff(got[:, 0]) < 0).all()


def test_a_level_not_drafted_moves_with_the_level_above() -> None:
    """The drafter's fall over depth is remembered, the text's level is not."""
    acceptance, rates = Acceptance(3, 1), np.array([[0.8], [0.6], [0.45]])
    feed(acceptance, CandidateShape.of(3, 1), rates, 500)
    feed(acceptance, CandidateShape.of(1, 1), 0.5 * rates, 200)
    got = acceptance.rates()[:, 0]
    assert got[0] == pytest.approx(0.4, abs=0.02)
    assert got[1] < 0.45 and got[2] < 0.3


def test_new_sequences_bring_the_usual_text_back_to_mind() -> None:
    acceptance, rates = Acceptance(1, 1), np.array([[0.8]])
    feed(acceptance, CandidateShape.of(1, 1), rates, 1500)
    feed(acceptance, CandidateShape.of(1, 1), 0.5 * rates, 120)
    changed = acceptance.rates()[0, 0]
    acceptance.forget(1.0)
    assert changed < 0.47 < 0.65 < acceptance.rates()[0, 0]


# ---------------------------------------------------------------- costs


def table() -> LatencyTable:
    target = {(b, n): b**0.5 * (1 + 0.1 * (n - 1)) for b in (1, 4) for n in (1, 2, 4, 8)}
    return LatencyTable(target, {(s, 1, b): 0.2 * s * b for s in (1, 3) for b in (1, 4)}, {1: 0.1, 4: 0.3})


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
    assert (read.target, read.draft, read.overhead) == (made.target, made.draft, made.overhead)
    path.write_text('{"target": [[1]]}')
    with pytest.raises(EngineFormatError, match="latency table"):
        LatencyTable.read(path)


def test_costs_follow_the_machine() -> None:
    """Verifying takes twice what the table says, one draft shape thrice; a hiccup of the machine is not believed."""
    rng, costs = np.random.default_rng(0), Costs(table())
    assert costs.verify_ms(4, 8)[5] == table().target_ms(4, 6)
    for number in range(80):
        noise = rng.normal(1, 0.05, 3) * (50 if number == 70 else 1)
        ms = {"draft": 3 * 0.8 * noise[0], "verify": 2 * table().target_ms(4, 6) * noise[1], "rest": 0.9 * noise[2]}
        costs.saw_round(4, (1, 1), 6, ms)
        costs.saw_plain(4, 5.0 * noise[0])
    np.testing.assert_allclose(costs.verify_ms(4, 8)[1:], 2 * table().target_curve(4, 8)[1:], rtol=0.08)
    assert costs.verify_ms(4, 8)[0] == pytest.approx(2.0 * 5.0 / 2.3, rel=0.08)
    assert costs.draft_ms((1, 1), 4) == pytest.approx(2.4, rel=0.08)
    assert costs.draft_ms((3, 1), 4) == pytest.approx(7.2, rel=0.08)
    assert costs.rest_ms(4) == pytest.approx(0.9, rel=0.08)
    assert costs.plain_ms(4) == pytest.approx(5.0, rel=0.08)
    assert costs.known(3, drafting=True) and not costs.known(1, drafting=True)


def test_what_the_drafter_has_not_read_costs_by_the_row() -> None:
    costs = Costs(table())
    for rows in (16, 30, 60, 100):
        costs.saw_backlog(4, rows, 0.05 * rows * 4)
    assert costs.backlog_ms(4, 128) == pytest.approx(0.05 * 128 * 4)
    assert costs.backlog_ms(1, 128) == pytest.approx(0.05 * 128)


def test_batches_share_buckets() -> None:
    assert [bucket(b) for b in (1, 2, 3, 4, 5, 8, 9, 16)] == [0, 1, 2, 2, 3, 3, 4, 4]
