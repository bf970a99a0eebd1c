"""Verdicts: each turns with the numbers it is about, and says when a grid cannot tell."""

from __future__ import annotations

import dataclasses

from trtllm_v4tree.bench.results import Cell, Results, summarise
from trtllm_v4tree.bench.stats import Estimate
from trtllm_v4tree.bench.verdicts import AIM, FAILS, HOLDS, PARTLY, UNKNOWN, paragraph, verdicts, why

from .synthetic import full_plan, samples

PLAN = full_plan(batch_sizes=(1, 4, 64))
RESULTS = summarise(samples(PLAN), PLAN, {}, True)


def _of(results: Results, words: str) -> str:
    [found] = [v for v in verdicts(results) if words in v.claim]
    return found.verdict


def _with_ratio(ratio: dict[int, float]) -> Results:
    """The same results with tree/linear set by budget."""

    def changed(cell: Cell) -> Cell:
        if cell.kind != "tree":
            return cell
        r = ratio[cell.budget]
        return dataclasses.replace(cell, to_linear=Estimate(r, r - 0.01, r + 0.01))

    return dataclasses.replace(RESULTS, cells=[changed(c) for c in RESULTS.cells])


def test_the_papers_own_ratios_are_found_to_hold() -> None:
    like_paper = _with_ratio({5: 1.0, 6: 1.08, 7: 1.1, 8: 1.1})
    assert _of(like_paper, "break-even") == HOLDS
    assert _of(like_paper, "From D=6") == HOLDS
    assert _of(like_paper, "best cell") == FAILS


def test_a_tree_that_loses_is_said_to_lose() -> None:
    losing = _with_ratio({5: 0.8, 6: 0.8, 7: 0.8, 8: 0.8})
    assert _of(losing, "break-even") == FAILS
    assert _of(losing, "From D=6") == FAILS


def test_a_plateau_is_neither_a_rise_nor_a_fall() -> None:
    for speed_at_8, verdict in ((1.5, HOLDS), (1.1, PARTLY), (2.0, FAILS)):

        def changed(cell: Cell, speed_at_8: float = speed_at_8) -> Cell:
            if cell.kind != "tree":
                return cell
            speed = 1.5 if cell.budget < 8 else speed_at_8
            length = 2.5 + 0.1 * cell.budget
            return dataclasses.replace(
                cell, to_plain=Estimate(speed, speed, speed), accepted_length=Estimate(length, length, length)
            )

        results = dataclasses.replace(RESULTS, cells=[changed(c) for c in RESULTS.cells])
        assert _of(results, "plateau") == verdict


def test_more_accepted_counts_cells() -> None:
    assert _of(RESULTS, "accepted longer") == HOLDS
    flipped = [
        dataclasses.replace(c, accepted_length=Estimate(1.0, 1.0, 1.0)) if c.kind == "tree" else c
        for c in RESULTS.cells
    ]
    assert _of(dataclasses.replace(RESULTS, cells=flipped), "accepted longer") == FAILS


def test_a_small_grid_says_what_it_cannot_tell() -> None:
    plan = full_plan(budgets=(6,), batch_sizes=(1,), datasets=("mbpp",))
    small = summarise(samples(plan), plan, {}, True)
    for words in (
        "grows with D",
        "break-even",
        "plateau",
        "small to medium",
        "least predictable",
        "depend on the batch",
    ):
        assert _of(small, words) == UNKNOWN
    assert "Not measured here: the gain in accepted length grows with D" in paragraph(small)


def test_the_projects_own_aim_is_not_counted_as_the_papers() -> None:
    tested = [v for v in verdicts(RESULTS) if v.published != AIM and v.verdict != UNKNOWN]
    assert f"of the {len(tested)} regularities" in paragraph(RESULTS)


def test_the_reason_is_a_measured_cost() -> None:
    cell, plain = RESULTS.cell("mbpp", 64, "s3_k2_d8"), RESULTS.cell("mbpp", 64, "none")
    assert cell and plain and cell.round_ms.value > plain.round_ms.value
    assert "at batch 64 a round of the D=8 tree takes" in why(RESULTS)
